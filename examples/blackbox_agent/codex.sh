#!/usr/bin/env bash
# Codex as --agent-command "examples/blackbox_agent/codex.sh": solves the prompt in a directory of its own, in Codex's
# sandbox. What is given here is passed on, such as --sandbox danger-full-access. The answer goes to the log: the last
# line on stdout would be read as the result, a reward among it.
set -euo pipefail
question=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["text"])')
CODEX_HOME=$(mktemp --directory)
export CODEX_HOME
trap 'rm -rf "$CODEX_HOME"' EXIT
mkdir "$CODEX_HOME/work"
cat > "$CODEX_HOME/config.toml" << END
model = "policy"
model_provider = "run"
web_search = "disabled"
sandbox_mode = "workspace-write"
[model_providers.run]
name = "run"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
codex exec --skip-git-repo-check --cd "$CODEX_HOME/work" "$@" - <<< "$question" >&2

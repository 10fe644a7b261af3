#!/usr/bin/env bash
# Claude Code as --agent-command "examples/blackbox_agent/claude.sh": solves the prompt in a directory of its own, and
# may run any command there. What is given here is passed on, such as --append-system-prompt. The answer goes to the
# log: the last line on stdout would be read as the result, a reward among it.
set -euo pipefail
question=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["text"])')
CLAUDE_CONFIG_DIR=$(mktemp --directory)
export CLAUDE_CONFIG_DIR CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
trap 'rm -rf "$CLAUDE_CONFIG_DIR"' EXIT
mkdir "$CLAUDE_CONFIG_DIR/work"
cd "$CLAUDE_CONFIG_DIR/work"
claude -p --model policy --allowedTools=Bash "$@" -- "$question" < /dev/null >&2

#!/usr/bin/env bash
# An agent that only uses the openai client; what is given here comes after blackbox.args and wins.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] || { echo "error: there is no .venv yet: run 'make setup' first" >&2; exit 2; }
.venv/bin/python -m examples.calculator_tool.prepare
exec .venv/bin/python -m miles_async train @examples/blackbox_agent/blackbox.args "$@"

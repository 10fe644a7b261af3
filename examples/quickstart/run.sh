#!/usr/bin/env bash
# The quick start; what is given here comes after reverse.args and wins:
#   examples/quickstart/run.sh --on-policy --run-dir runs/on-policy
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] || { echo "error: there is no .venv yet: run 'make setup' first" >&2; exit 2; }
.venv/bin/python -m examples.quickstart.prepare --task reverse
exec .venv/bin/python -m miles_async train @examples/quickstart/reverse.args "$@"

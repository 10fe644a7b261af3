#!/usr/bin/env bash
# A real language model learns sums; what is given here comes after sums.args and wins.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] || { echo "error: there is no .venv yet: run 'make setup' first" >&2; exit 2; }
.venv/bin/python -m examples.smollm2.prepare
exec .venv/bin/python -m miles_async train @examples/smollm2/sums.args "$@"

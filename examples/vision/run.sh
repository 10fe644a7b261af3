#!/usr/bin/env bash
# A tiny model learns to name colours in pictures; what is given here comes after colours.args and wins.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] || { echo "error: there is no .venv yet: run 'make setup' first" >&2; exit 2; }
.venv/bin/python -m examples.vision.prepare
exec .venv/bin/python -m miles_async train @examples/vision/colours.args "$@"

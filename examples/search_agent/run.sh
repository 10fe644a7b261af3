#!/usr/bin/env bash
# Two retrieval servers and a run that uses them; what is given here comes after search.args and wins.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] || { echo "error: there is no .venv yet: run 'make setup' first" >&2; exit 2; }
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true' EXIT
SEARCH_ENDPOINTS=""
for _ in 1 2; do
    exec {output}< <(exec .venv/bin/python -m examples.search_agent.retrieval_server)
    servers+=($!)
    read -r url <&"$output"  # which it prints when it listens
    SEARCH_ENDPOINTS+="$url,"
done
export SEARCH_ENDPOINTS
.venv/bin/python -m miles_async train @examples/search_agent/search.args "$@"

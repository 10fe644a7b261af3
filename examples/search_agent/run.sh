#!/usr/bin/env bash
# Two retrieval servers and a run that uses them; what is given here comes after search.args and wins.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] || { echo "error: there is no .venv yet: run 'make setup' first" >&2; exit 2; }
ports=(${SEARCH_PORTS:-8071 8072})
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true' EXIT
SEARCH_ENDPOINTS=""
for port in "${ports[@]}"; do
    .venv/bin/python -m examples.search_agent.retrieval_server --port "$port" &
    servers+=($!)
    SEARCH_ENDPOINTS+="http://127.0.0.1:$port,"
done
export SEARCH_ENDPOINTS
.venv/bin/python -m miles_async train @examples/search_agent/search.args "$@"

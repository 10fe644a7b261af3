#!/bin/sh
# Healthy: the run in MILES_ASYNC_RUN_DIR (default /runs/latest) answers. A container that runs none, such as a node of
# Ray's or one that shows a run that is over, is healthy as long as its process is up, which Docker sees by itself.
run_dir=${MILES_ASYNC_RUN_DIR:-/runs/latest}
[ -e "$run_dir/run.json" ] || exit 0
miles-async status "$run_dir" --json | grep -q '"state": "running"' || exit 0
miles-async scale "$run_dir" >/dev/null || exit 1

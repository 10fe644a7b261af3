"""``make bench``: all benchmarks, or those that are named. ``runs/bench/NAME.json`` has what each measured.

Figures of times are of this machine and of what else runs on it; ratios within one table are worth more.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.benchmarks import (
    buffer_cost,
    checkpoint_saves,
    deltas,
    digests,
    hot_path,
    in_flight,
    ledger_store,
    loop_lag,
    node_files,
    publication,
    publication_control,
    publication_links,
    quickstart_overlap,
    requests,
    samples,
    session_streams,
    sessions,
    simulated_in_flight,
    simulated_scale,
    staging,
    start,
    trackers,
    trainer_step,
    watch_page,
)
from tests.benchmarks.report import report

PARTS = {
    "quickstart_overlap": quickstart_overlap.rows,
    "schedule": simulated_scale.schedule,
    "routers": simulated_scale.routers,
    "cpu": simulated_scale.cpu,
    "buffer_cost": buffer_cost.rows,
    "digests": digests.rows,
    "deltas": deltas.rows,
    "answers": hot_path.answers,
    "batches": hot_path.batches,
    "ledger_store": ledger_store.rows,
    "loop_lag": loop_lag.rows,
    "staging": staging.rows,
    "checkpoint_saves": checkpoint_saves.rows,
    "node_files": node_files.rows,
    "publication": publication.rows,
    "publication_links": publication_links.rows,
    "publication_control": publication_control.rows,
    "sessions": sessions.rows,
    "session_rates": sessions.rates,
    "session_protocols": sessions.protocols,
    "session_lengths": sessions.lengths,
    "session_streams": session_streams.rows,
    "session_streams_client": session_streams.client,
    "requests": requests.rows,
    "start": start.rows,
    "request_rates": requests.rates,
    "in_flight": in_flight.rows,
    "simulated_in_flight": simulated_in_flight.rows,
    "trainer_step": trainer_step.rows,
    "samples": samples.rows,
    "samples_cpu": samples.cpu,
    "trackers": trackers.rows,
    "watch_page": watch_page.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)} (default: all)")
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for number, part in enumerate(parts, start=1):
        print(f"[{number}/{len(parts)}] {part} ({time.strftime('%H:%M:%S')})", file=sys.stderr, flush=True)
        report(part, PARTS[part]())


if __name__ == "__main__":
    main()

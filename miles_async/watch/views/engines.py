"""Engines and ranks as ledger, metrics and logs know them, and the publications between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from miles_async.errors import LedgerError
from miles_async.ledger.reader import AttemptRecord
from miles_async.types import EnginesReport, JsonObject
from miles_async.watch.run import Run
from miles_async.watch.timeline.notes import ENGINE_EVENTS, time_of
from miles_async.watch.timeline.steps import DELIVERY
from miles_async.watch.views import logs
from miles_async.watch.views.flags import flat
from miles_async.watch.views.lanes import lanes

RECENT = 2_000  # attempts that are looked at
PUBLICATIONS = 40
NOW = (
    *("rollout/requests", "rollout/concurrency_limit", "rollout/in_flight", "rollout/buffered", "rollout/lead"),
    *("rollout/prefix_cache_hit_rate", "router/workers", "router/connections", "router/request_seconds/mean"),
    *("router/failed_requests", "router/affinity", "rollout/services_down", "weight_version/trainer"),
)
PHASES = ("copy", *DELIVERY)
_ENGINE_LOG = re.compile(r"(?P<engine>.+-\d+)\.(?P<start>\d+)\.log")
_DEFAULT_ENGINE = re.compile(r"engine-\d+")  # of runs without --server-groups
_RANK_LOG = re.compile(r"trainer-(\d+)\.log")


def engines(run: Run) -> JsonObject:
    """{"engines", "lanes", "ranks", "now": metric → last value, "phases", "publications", "rolling": phases are sums
    over engines, "recent": attempts read, "reported": when engines were asked for their load}.
    """
    run.metrics.refresh()
    names = [str(log["name"]) for log in logs.logs(run)]
    notes: list[str] = []
    records: list[AttemptRecord] = []
    try:
        with run.ledger() as reader:
            records = [] if reader is None else reader.page(limit=RECENT)
    except LedgerError as error:
        notes.append(str(error))
    reported = run.engines()
    found = _engines(run, names, records, reported)
    rolling = flat(run).get("publish-order") == "rolling"
    whole = len(records) < RECENT
    return {
        "engines": found,
        "lanes": lanes(
            run,
            [str(each["engine"]) for each in found],
            records,
            whole=whole,
            rolling=rolling,
            reported=reported,
            ranks=run.ranks(),
        ),
        "rolling": rolling,
        "ranks": [{"rank": int(m[1]), "log": m[0]} for name in names if (m := _RANK_LOG.fullmatch(name))],
        "now": {name: value for name in NOW if (value := run.metrics.last(name)) is not None},
        "phases": [phase for phase in PHASES if run.metrics.last(f"publish/{phase}_seconds") is not None],
        "publications": _publications(run),
        "recent": len(records),
        "reported": None if reported is None else reported.time,
        "notes": notes,
    }


def _engines(
    run: Run, names: Iterable[str], records: Sequence[AttemptRecord], reported: EnginesReport | None
) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    known = {engine for record in records for engine in record.engines or ()} | {
        *(reported.engines if reported else ())
    }
    for name in names:
        match = _ENGINE_LOG.fullmatch(name)
        if match and (match["engine"] in known or _DEFAULT_ENGINE.fullmatch(match["engine"])):
            starts, entry = int(match["start"]) + 1, _entry(found, match["engine"])
            if starts > entry["starts"]:
                entry |= {"starts": starts, "log": name}
    if reported is not None:
        for engine, each in reported.engines.items():
            _entry(found, engine).update(state=each.state, role=each.role)
            if (load := each.load) is not None:
                found[engine].update(kv_use=load.kv_use, running=load.running, waiting=load.waiting)
    for engine, state, at in _events(run):
        if reported is None or (at is not None and at > reported.time):
            _entry(found, engine).update(state=state)
    for record in records:
        for engine in record.engines or ():
            entry = _entry(found, engine)
            entry["groups"] += 1
            entry["tokens"] += sum(record.response_lengths or ()) // len(record.engines or ())
            if entry["version"] is None and record.newest_version is not None:  # newest attempt first
                entry["version"] = record.newest_version
    return sorted(found.values(), key=lambda entry: logs.natural(entry["engine"]))


def _entry(found: dict[str, dict[str, Any]], engine: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("state", "role", "log", "version", "kv_use", "running", "waiting"))
    return found.setdefault(engine, {"engine": engine, **nothing, "starts": 0, "groups": 0, "tokens": 0})


def _events(run: Run) -> Iterator[tuple[str, str, float | None]]:
    """(engine, state after it, when) of each such event in the rollout side's log."""
    lines = logs.page(run, "rollout.log")["lines"]
    for line in lines:
        state = ENGINE_EVENTS.get(line["text"])
        engine = line.get("fields", {}).get("engine")
        if state and engine:
            yield engine, state, time_of(line["timestamp"])


def _publications(run: Run) -> list[JsonObject]:
    """The last publications: step, seconds per phase, pause, bytes."""
    wanted = [*(f"publish/{phase}_seconds" for phase in PHASES), "publish/pause_seconds", "publish/bytes"]
    rows = run.metrics.rows(wanted)
    found: list[JsonObject] = []
    for step in list(rows)[-PUBLICATIONS:]:
        row = rows[step]
        phases = {phase: row[name] for phase in PHASES if (name := f"publish/{phase}_seconds") in row}
        pause, size = row.get("publish/pause_seconds"), row.get("publish/bytes")
        found.append({"step": step, "phases": phases, "pause": pause, "bytes": size})
    return found

"""The report of engines: their state, load and pauses, as a file that is always whole."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from miles_async.engines import reports
from miles_async.engines.fleet import Fleet
from miles_async.engines.load import Loads
from miles_async.engines.registry import PAUSES, EngineRecord, EngineRegistry, EngineState
from miles_async.engines.reports import EngineReports
from miles_async.seams import InferenceServer
from miles_async.types import EngineLoad, EnginesReport
from tests.fakes.clients import registry_of, serving

LOAD = EngineLoad(running=3, waiting=1, kv_use=0.25)


class Server:
    """Every engine has the same load, and does what it is told."""

    async def load(self, url: str, timeout: float) -> EngineLoad:
        return LOAD

    async def pause(self, url: str, mode: str, timeout: float) -> None: ...

    async def resume(self, url: str, timeout: float) -> None: ...


def registry_with(*names: str) -> EngineRegistry:
    return registry_of(*(serving(f"http://{name}", name) for name in names))


def read(path: Path) -> EnginesReport | None:
    return msgspec.json.decode(path.read_bytes(), type=EnginesReport) if path.exists() else None


async def read_when(path: Path, changed_after: float) -> EnginesReport:
    async with asyncio.timeout(30):
        while True:
            if (report := read(path)) is not None and report.time > changed_after:
                return report
            await asyncio.sleep(0.005)


async def test_states_loads_and_pauses_of_all_registries_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "REPORT_SECONDS", 0.01)
    train, judges, path = registry_with("engine-0", "engine-1"), registry_with("judge-0"), tmp_path / "engines.json"
    server, began = Server(), time.time()
    fleet = Fleet(train, SimpleNamespace(), server, SimpleNamespace(in_flight=0))  # type: ignore[arg-type]
    asked = [(Loads(train, server), "train"), (Loads(judges, server), "frozen")]  # type: ignore[arg-type]
    writing = asyncio.ensure_future(EngineReports(asked, path).run())
    found = await read_when(path, 0.0)
    assert [*found.engines] == ["engine-0", "engine-1", "judge-0"]
    assert [each.role for each in found.engines.values()] == ["train", "train", "frozen"]
    assert {(each.state, each.load, each.pauses) for each in found.engines.values()} == {("serving", LOAD, ())}

    engine = train.engines["engine-0"]
    await fleet.call([engine.current], InferenceServer.pause, "retract")
    paused = (await read_when(path, time.time())).engines["engine-0"]
    assert paused.load == LOAD  # as it was before
    ((since, until),) = paused.pauses
    assert began <= since <= time.time()
    assert until is None
    await fleet.call([engine.current], InferenceServer.resume)
    train.engines["engine-1"].state = EngineState.FENCED
    writing.cancel()
    await asyncio.wait([writing])
    report = read(path)
    assert report is not None
    last = report.engines
    ((since, until),) = last["engine-0"].pauses
    assert until is not None
    assert since <= until <= time.time()
    assert (last["engine-1"].state, last["engine-1"].pauses) == ("fenced", ())


def test_a_restart_ends_a_pause_and_the_last_pauses_are_kept() -> None:
    record = EngineRecord("engine-0")
    record.pause()
    record.pause()  # of one that is paused already
    record.forget(EngineState.FENCED)
    assert [until is None for _, until in record.pauses] == [False]
    for _ in range(PAUSES + 5):
        record.pause()
        record.resume()
    assert len(record.pauses) == PAUSES


async def test_a_full_disk_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "REPORT_SECONDS", 0.01)
    path = tmp_path / "gone" / "engines.json"
    writing = asyncio.ensure_future(EngineReports([(Loads(registry_with("engine-0"), Server()), "train")], path).run())  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    path.parent.mkdir()
    await read_when(path, 0.0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing

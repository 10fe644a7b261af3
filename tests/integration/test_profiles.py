"""A run whose second step is profiled: what lies in its directory, on its page, and on its timeline."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from miles_async.ledger.reader import open_ledger
from miles_async.watch.run import Run
from miles_async.watch.timeline.build import write_timeline
from miles_async.watch.views.files import files
from tests.integration.real_run import real_run
from tests.unit.watch.timeline.trace_files import MICROSECOND, read_trace

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

STEPS = 3
PROFILES = ["step-2.rank-0.json.gz", "step-2.rank-1.json.gz"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, imported_reverse: tuple[str, ...]) -> Path:
    flags = ("--num-rollout", str(STEPS), "--rollout-num-gpus", "1", "--profile-step", "2", "--profile-ranks", "all")
    with real_run(tmp_path_factory.mktemp("profiled") / "run", *flags, command=imported_reverse) as run:
        assert run.wait(150) == 0, run.output
        run.assert_nothing_left()
        assert len(run.steps) == STEPS
        return run.run_dir


def test_each_rank_leaves_a_profile_of_its_forward_and_backward_pass(run_dir: Path) -> None:
    for name in PROFILES:
        content = json.loads(gzip.decompress((run_dir / "profiles" / name).read_bytes()))
        names = {event["name"] for event in content["traceEvents"]}
        assert "aten::mm" in names
        assert any("Backward" in each for each in names)


def test_the_page_lists_them(run_dir: Path) -> None:
    assert [file["name"] for file in files(Run(run_dir, "run"))] == ["timeline.json.gz", *PROFILES]


def test_the_timeline_of_a_real_run(run_dir: Path, tmp_path: Path) -> None:
    write_timeline(Run(run_dir, "run"), tmp_path / "timeline.json.gz")
    trace = read_trace(tmp_path / "timeline.json.gz")
    with open_ledger(run_dir / "ledger.sqlite") as reader:
        records = [*reader.alive_since(0.0)]
    groups = {span.name for span in trace.spans("engine-0", "groups")}
    assert groups == {f"attempt {each.attempt_id}" for each in records if each.engines}
    steps = trace.spans("trainer", "steps", "step")
    assert [step.name for step in steps] == [f"step {number}" for number in range(1, STEPS + 1)]
    # A request lies within its group's span, which the ledger timed in another thread.
    spans = {span.name: span for span in trace.spans("engine-0", "groups")}
    requests = [span for span in trace.spans("engine-0", "requests") if span.cat == "train request"]
    assert requests
    for request in requests:
        group = spans[request.name.partition(" sample")[0]]
        assert group.ts * MICROSECOND - 0.01 <= request.ts * MICROSECOND
        assert request.end * MICROSECOND <= group.end * MICROSECOND + 0.01

"""What views of the page show of a real run, compared with the files of its directory, number by number; in Chromium,
where it is installed, each view is drawn as well.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from miles_async.ledger.reader import open_ledger
from miles_async.observability.metrics_file import FILE_NAME, read_metrics
from miles_async.runtime.files.run_directory import LEDGER_FILE
from miles_async.runtime.network.keys import Secret
from miles_async.samples.columns import SampleRow
from miles_async.samples.reader import read_rows, samples_files
from miles_async.watch.run import open_runs
from miles_async.watch.server import VIEWS, make_app
from miles_async.watch.views.attempts import PAGE
from tests.integration.watch_browser import CHROMIUM, DRIVER, Page, browser, served

KEY = "read-key"
BASE = "http://127.0.0.1:8741"
NO_METRICS = {"kind", "step", "time"}  # of a line of metrics.jsonl

View = Callable[..., Any]
"""(view, parameters) → its JSON"""


def assert_views_show(run_dir: Path, ending: str | None = "finished") -> list[SampleRow]:
    """Every view of the page answers, and metrics and samples are those of the files. Returns all rows of samples.

    ``ending``: of the run; None: it was killed.
    """
    headers = {"Authorization": f"Bearer {KEY}"}
    with TestClient(make_app(open_runs([run_dir]), Secret(KEY)), base_url=BASE, headers=headers) as client:

        def view(name: str, /, **parameters: object) -> Any:
            answer = client.get(
                f"/api/{name}", params={"run": "0", **{key: str(each) for key, each in parameters.items()}}
            )
            assert answer.status_code == 200, (name, parameters, answer.text)
            return answer.json()

        for name in VIEWS.keys() - {"sample"}:
            view(name, name="driver.log", subject="1")
        assert_metrics(view, run_dir, ending)
        assert_attempts(view, run_dir)
        files = samples_files(run_dir)
        rows = [row for file in files for row in assert_samples(view, file.kind, file.step, file.path)]
    if CHROMIUM and DRIVER:
        with opened(run_dir) as page:
            assert_every_view_is_drawn(page, run_dir, rows)
    return rows


@contextmanager
def opened(run_dir: Path) -> Iterator[Page]:
    """The page in Chromium. In the end nothing is in the console, and nothing but the server was asked."""
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page, served([run_dir]) as base:
        page.driver.get("about:blank")
        page.requests()  # of the browser's start
        page.open(base)
        yield page
        assert page.complaints() == []
        assert [url for url in page.requests() if not url.startswith(("about:", "data:", f"{base}/"))] == []


def step_of(page: Page) -> int:
    """The step in the overview."""
    return int(page.text(".tile[data-name=step] b").replace(",", ""))


def assert_every_view_is_drawn(page: Page, run_dir: Path, rows: list[SampleRow]) -> None:
    """``rows``: all samples of the run."""
    steps = [row for row in read_metrics(run_dir / FILE_NAME) if "time/step_seconds" in row]
    assert step_of(page) == len(steps)
    page.go("metrics?run=0")
    assert {each.get_attribute("data-metric") for each in page.all("figure")} >= steps[-1].keys() - NO_METRICS
    for view in ("engines", "attempts", "flags", "logs"):
        page.go(f"{view}?run=0")
        assert len(page.text("main")) > 20
    (kind, step) = (rows[-1].kind, rows[-1].step)
    page.go(f"samples?run=0&kind={kind}&step={step}")
    there = [row for row in rows if (row.kind, row.step) == (kind, step)]
    assert f"{len(there):,} samples of step {step}" in page.text("caption")
    row = max(there, key=lambda row: len(row.turns))
    page.go(f"samples?run=0&kind={kind}&step={step}&attempt={row.attempt_id}&sample={row.sample}")
    assert len(page.all("tbody tr")) == (len(row.turns) if len(row.turns) > 1 else 0)
    assert len(page.all(".tokens > span")) == min(len(row.tokens), len(row.tokens) - max(0, row.prompt_length - 50))


def assert_metrics(view: View, run_dir: Path, ending: str | None) -> None:
    """The overview's state, and each number of each step in the curves."""
    steps = [row for row in read_metrics(run_dir / FILE_NAME) if "time/step_seconds" in row]
    overview = view("overview")
    assert (overview["run"]["step"], overview["run"]["ending"], overview["notes"]) == (len(steps), ending, [])
    for name, last in steps[-1].items():
        if name not in NO_METRICS and last is not None:
            found = view("series", name=name)[name]
            assert dict(zip(found["steps"], found["values"], strict=True))[len(steps)] == last, name
    listed = {each["name"] for section in view("metrics")["sections"] for each in section["metrics"]}
    assert steps[-1].keys() - NO_METRICS <= listed


def assert_attempts(view: View, run_dir: Path) -> None:
    """The newest attempts, and the counts of all."""
    path = run_dir / LEDGER_FILE
    if not path.exists():  # supervised training
        assert view("attempts")["missing"]
        return
    with open_ledger(path) as reader:
        records, balance = reader.page(limit=PAGE), reader.balance()
    shown = [(each["attempt"], each["prompt"], each["step"], each["reward"]) for each in view("attempts")["rows"]]
    assert shown == [(each.attempt_id, each.prompt_id, each.step, each.reward_mean) for each in records]
    assert view("overview")["groups"] == balance.summary()


def assert_samples(view: View, kind: str, step: int, path: Path) -> list[SampleRow]:
    """The table of a step, and each sample of it with its conversation and its tokens."""
    rows = read_rows(path)
    found = view("samples", kind=kind, step=step)
    shown = {(each["attempt_id"], each["sample"], each["branch"]): each for each in found["rows"]}
    assert shown.keys() == {(row.attempt_id, row.sample, row.branch) for row in rows}
    for row in rows:
        listed = shown[row.attempt_id, row.sample, row.branch]
        assert (listed["reward"], listed["turns"], listed["age"]) == (row.reward, len(row.turns), row.age)
    for row in [row for row in rows if row.branch == 0][:16]:
        sample = view("sample", kind=kind, step=step, attempt=row.attempt_id, sample=row.sample, first=0, whole=1)
        branch = sample["branches"][0]
        tokens = branch["window"]
        assert (tokens["texts"], tokens["ids"], tokens["loss"]) == (row.token_texts, row.tokens, row.loss_mask)
        assert (tokens["versions"], tokens["entropies"]) == (row.weight_versions, row.entropies)
        assert tokens["trainer_logprobs"] == row.trainer_logprobs
        if tokens["differences"] is not None:
            assert row.trainer_logprobs is not None
            pairs = zip(row.rollout_logprobs, row.trainer_logprobs, strict=True)
            assert tokens["differences"] == pytest.approx([engine - trainer for engine, trainer in pairs])
        texts = "".join(part["text"] for part in branch["conversation"])
        messages = json.loads(row.messages) if row.messages else [{"content": row.response}]
        assert all((message["content"] or "") in texts for message in messages)
        assert [turn["start"] for turn in branch["turns"]] == [turn.start for turn in row.turns]
    return rows

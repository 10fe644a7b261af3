"""Samples of a run in Chromium: the table of a step, one sample as a conversation and by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path

import pytest

from miles_async.samples.columns import SampleRow, Turn
from tests.integration.watch_browser import CHROMIUM, DRIVER, Page, browser, served
from tests.unit.samples.sample_rows import row, write_samples
from tests.unit.watch.run_files import write_finished_run

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver: apt-get install -y chromium chromium-driver",
)

Serve = Callable[..., str]
"""Rows → address of a run that has them in step 10."""

ONE = "samples?run=0&kind=train&step=10&attempt=17&sample=0"
ENGINES, SIGNED = "sampled by no engine", ["+0.25", "−0.25"]
LEGENDS = {
    "versions": ["v7", "v8", ENGINES],
    "ages": ["age 1", "age 2", ENGINES],
    "reasons": ["carries loss", "prompt", "sampled, without loss"],
    "advantages": SIGNED,
    "differences": SIGNED,
    "logprobs": ["size 0.5"],
    "entropies": ["size 1.5"],
}
COLUMNS = (
    *("attempt_id", "sample", "reward", "finish_reason", "length", "age", "turns", "advantage"),
    *("logprob_difference", "prompt", "response", "label"),
)
"""Columns of the samples table, from left to right."""

CONDITIONS = {"group": "attempt_id", "tokens": "length"} | {
    name: name for name in ("reward", "age", "turns", "advantage")
}
"""Name in a condition → column."""

COUNT = 7
ANSWERS = f"tbody td:nth-child({COLUMNS.index('response') + 1})"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page
        assert page.complaints() == []


@pytest.fixture
def serve(tab: Page, tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def serve(*rows: SampleRow) -> str:
            write_samples(write_finished_run(tmp_path / "run"), "train", 10, rows)
            return stack.enter_context(served([tmp_path / "run"]))

        yield serve
        tab.leave()


@pytest.fixture
def page(tab: Page, tmp_path: Path) -> Iterator[Page]:
    """The page of the run of ``write_finished_run``."""
    with served([write_finished_run(tmp_path / "first")]) as base:
        tab.open(base)
        yield tab
        tab.leave()


def test_samples_are_sorted_filtered_searched_and_opened(page: Page) -> None:
    page.go("samples?run=0")
    assert len(page.all("tbody tr")) == 8
    column = lambda: [row.text.split()[2] for row in page.all("tbody tr")]  # noqa: E731
    next(each for each in page.all("th button") if each.text == "reward").click()
    page.until(lambda: column() == ["0.75", "0.75", "0.5", "0.5", "0.25", "0.25", "0", "0"])
    page.one("input[type=search]").send_keys("answer 2")
    page.until(lambda: len(page.all("tbody tr")) == 2)
    page.one(".controls input[type=checkbox]").click()
    page.until(lambda: len(page.all("tbody tr")) == 6)  # of all three steps
    page.go("samples?run=0&step=10")
    conditions = page.one("input[aria-label=conditions]")
    conditions.send_keys("reward>=0.5 group=2 tokens<4 age=2 turns=1")
    page.until(lambda: column() == ["0.5", "0.75"])
    conditions.send_keys(" advantage>0.25")
    page.until(lambda: "no sample fits" in page.text("main"))
    assert conditions.get_attribute("aria-invalid") == "false"
    page.go("samples?run=0&step=10&where=reward%3E0.25+magic%3D1")
    page.until(lambda: column() == ["0.5", "0.75"] * 2)
    page.go("samples?run=0&step=10")
    page.all("tbody tr")[1].click()
    page.until(lambda: "Sample 1 of group 1" in page.text("main"))
    assert "21" in page.text(".message.assistant")
    assert "1, 0.5 s" in page.text(".pairs")
    assert "token 0, id 5" not in page.text("output")
    page.one(".tokens").send_keys("\ue014" * 3)  # arrow right
    page.until(lambda: "id 7 · version 7 · age 2 · carries loss" in page.text("output"))
    known = "log-prob -0.5 · trainer's log-prob -0.75 · engine − trainer 0.25 · advantage 0.25 · entropy 1.5"
    assert known in page.text("output").replace("−0", "-0")
    for mode, legend in LEGENDS.items():
        page.one(f"select[aria-label='shade tokens by'] option[value={mode}]").click()
        assert page.text(".legend").split("\n") == legend
        assert len(page.all(".tokens > .shade, .tokens > [class*=kind-]")) == (3 if mode in ("versions", "ages") else 5)


def in_another_order_by_each_column(number: int) -> SampleRow:
    """Row ``number`` of COUNT rows."""
    place = {name: (number * (column % (COUNT - 1) + 1) + column) % COUNT for column, name in enumerate(COLUMNS)}
    texts = {name: f"{name} {place[name]}" for name in ("prompt", "response", "label")}
    end, turns = ("abort", "length", "stop")[place["finish_reason"] % 3], [Turn(start=2, end=3)] * place["turns"]
    return row(**(place | texts | {"finish_reason": end, "turns": turns}))


def test_every_column_sorts_and_filters(tab: Page, serve: Serve) -> None:
    rows = [in_another_order_by_each_column(number) for number in range(COUNT)]
    value = {name: attrgetter(name) for name in COLUMNS} | {"turns": lambda sample: len(sample.turns)}
    tab.open(serve(*rows), "samples?run=0&step=10")

    def shows(expected: list[SampleRow]) -> None:
        tab.until(lambda: [each.text for each in tab.all(ANSWERS)] == [sample.response for sample in expected])

    for column, name in enumerate(COLUMNS):
        for down in (True, False):
            tab.all("th button")[column].click()
            shows(sorted(rows, key=value[name], reverse=down))
    by_label = sorted(rows, key=attrgetter("label"))
    for name, key in CONDITIONS.items():
        tab.one("input[aria-label=conditions]").send_keys(f"{name}>=4 {name}<6")
        shows([sample for sample in by_label if 4 <= value[key](sample) < 6])
        tab.one("input[aria-label=conditions]").clear()
        tab.one("input[aria-label=conditions]").send_keys(" ")
        shows(by_label)
    tab.one("select[aria-label=finish] option[value=length]").click()
    shows([sample for sample in by_label if sample.finish_reason == "length"])
    tab.one("select[aria-label=finish] option[value='']").click()
    shows(by_label)
    tab.all("td button")[3].click()  # its group
    shows([by_label[3]])


def test_a_conversation_has_thinking_tools_and_branches(tab: Page, serve: Serve) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6}'}}
    messages = [
        {"role": "user", "content": "6 times 7?"},
        {"role": "assistant", "content": "", "reasoning_content": "better ask", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    branches = [row(branches=2, branch=number, messages=json.dumps(messages[: 4 - number])) for number in (0, 1)]
    tab.open(serve(*branches), ONE)
    roles = ["user", "assistant, reasoning", "assistant, tool calls", "tool", "assistant"]
    assert [each.text for each in tab.all(".message h3")] == [*roles, *roles[:-1]]
    words = [each.text for each in tab.all(".words")]
    assert (words[1], words[3], words[4]) == ("better ask", "42", "It is 42.")
    assert '"name": "multiply"' in words[2]
    headings = [each.text for each in tab.all("h2")]
    assert {f"{part}, branch {number} of 2" for part in ("Conversation", "Tokens") for number in (1, 2)} <= {*headings}


def test_every_turn_has_its_time(tab: Page, serve: Serve) -> None:
    turns = [Turn(start=2, end=3, started_at=1.8e9, seconds=0.25), Turn(start=3, end=5, seconds=None)]
    tab.open(serve(row(turns=turns)), ONE)
    first, second = (each.text.split() for each in tab.all("tbody tr"))
    assert (first[:3], first[-1]) == (["1", "2", "1"], "0.25")
    assert second == ["2", "3", "2", "–", "–"]


def test_a_megabyte_is_shown_in_part_until_all_of_it_is_asked_for(tab: Page, serve: Serve) -> None:
    text = "<b>ä</b>" * 125_000
    tab.open(serve(row(response=text)), ONE)
    length = "return document.querySelector('.message.response .words').textContent.length"
    assert tab.driver.execute_script(length) == 100_000
    assert "900,000 more characters" in tab.text(".message.response")
    next(each for each in tab.all("button") if each.text == "load the whole texts").click()
    tab.until(lambda: tab.driver.execute_script(length) == len(text))
    assert tab.all(".message b") == []

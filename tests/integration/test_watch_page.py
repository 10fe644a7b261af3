"""The page of a run in Chromium: every view, by pointer and by keyboard, on a run directory and as a report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial, reduce
from pathlib import Path

import msgspec
import pytest
from selenium.webdriver import ActionChains

from miles_async.observability.metric_names import describe
from miles_async.observability.metrics_file import FILE_NAME, MetricsFile, read_metrics
from miles_async.runtime.files.run_directory import ENGINES_FILE
from miles_async.types import EngineReport, EnginesReport
from miles_async.watch.report import write_report
from miles_async.watch.run import open_runs
from miles_async.watch.views.lanes import IDLE, KINDS
from tests.fakes.live_run import live_run
from tests.integration.watch_browser import CHROMIUM, DRIVER, KEY, Page, browser, served
from tests.unit.watch.run_files import HOSTILE, REASON, STEPS, write_finished_run
from tests.unit.watch.timeline.trace_files import read_trace

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver: apt-get install -y chromium chromium-driver",
)

VIEWS = ("overview", "metrics", "samples", "attempts", "engines", "flags", "logs")
SAMPLE = "samples?run=0&kind=train&step=30&attempt=2&sample=3"


READABLE = 4.5  # WCAG 2.2, success criterion 1.4.3: contrast of text and background
THEME = "return document.documentElement.dataset.theme"
CONTRASTS = """
const channels = (text) => {
  const [r, g, b, a = 1] = text.match(/[\\d.]+(e-\\d+)?/g).map(Number);
  return text.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
};
const linear = (c) => (c <= 10.3 ? c / 3294 : ((c / 255 + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const behind = (element) => {
  if (!element) return [255, 255, 255];
  const [r, g, b, a] = channels(getComputedStyle(element).backgroundColor);
  const under = a < 1 ? behind(element.parentElement) : [0, 0, 0];
  return [r, g, b].map((value, index) => a * value + (1 - a) * under[index]);
};
const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
return [...document.querySelectorAll("body *")].filter(hasText).flatMap((element) => {
  const [low, high] = [light(channels(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => a - b);
  return [[(high + 0.05) / (low + 0.05), element.textContent.slice(0, 40)]];
});
"""
DIFFERENT_FLAGS = ["--max-weight-staleness", "--eps-clip-high", "--use-rollout-logprobs"]  # of the preset staleness-2
PROCESSES_OF_RUN = ["driver and rollout", "trainer ranks", "engines"]


def hard_to_read(page: Page) -> list[tuple[float, str]]:
    """(contrast, text) of texts that have too little."""
    contrasts = page.driver.execute_script(CONTRASTS)
    assert len(contrasts) > 20
    return [each for each in contrasts if each[0] < READABLE]


def is_shown(page: Page, view: str) -> bool:
    return page.shown() == view


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_finished_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def other_dir(run_dir: Path) -> Path:
    return write_finished_run(run_dir.with_name("second"), steps=50, ending=None)


@pytest.fixture(scope="module")
def base(run_dir: Path, other_dir: Path) -> Iterator[str]:
    with served([run_dir, other_dir]) as address:
        yield address


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(tab: Page, base: str) -> Iterator[Page]:
    """The page with its key; afterwards nothing is in the console, and only the server was asked."""
    tab.open(base)
    tab.complaints()
    tab.requests()
    yield tab
    assert tab.complaints() == []
    asked = [url for url in tab.requests() if not url.startswith(("data:", f"{base}/"))]
    assert asked == []


@pytest.mark.parametrize("view", [*VIEWS, SAMPLE, "attempts?run=0&subject=1", "metrics?run=0&run=1"])
def test_every_view_opens(page: Page, view: str) -> None:
    page.go(view)
    assert len(page.text("main")) > 20


def test_the_overview_has_the_numbers_of_the_run(page: Page, run_dir: Path) -> None:
    rows = [row for row in read_metrics(run_dir / FILE_NAME) if "reward/mean" in row]
    mean = sum(row["reward/mean"] for row in rows[-5:]) / 5
    assert page.text(".tile[data-name=step] b") == str(STEPS)
    assert float(page.text(".tile[data-name=reward] b")) == pytest.approx(mean, abs=5e-4)
    assert page.text(".tile[data-name=age] b") == "0.75"
    assert page.text(".tile[data-name='tokens/s'] b") == "2,000"
    assert [page.text(f".tile[data-name='{side} idle'] b") for side in ("trainer", "rollout")] == ["25 %", "25 %"]
    assert "after step 20: lr 0.0005 → 0.0004" in page.text("main")
    assert "filtered" in page.text(".ends")
    assert "see --engine-timeout, docs/engines.md" in page.text(".warnings")
    assert page.all(".u-over")  # a chart was drawn
    assert f"mean of 5 steps from 0.12 to {mean:.2f}" in page.one(".chart").get_attribute("aria-label")
    first_step = [page.all(".cells i")[number].get_attribute("style") for number in (0, STEPS)]
    assert first_step == ["--share: 0.77;", "--share: 0.31;"]  # of age 1, of age 0
    page.one(".strip").send_keys("\ue014")  # arrow right
    assert page.text("output") == "step 2: age 0: 32 (25 %), age 1: 96 (75 %)"


def test_metrics_are_found_zoomed_and_compared(page: Page, run_dir: Path) -> None:
    page.go("metrics?run=0")
    names = {name for row in read_metrics(run_dir / FILE_NAME) for name in row} - {"step", "time"}
    assert {each.get_attribute("data-metric") for each in page.all("figure")} == names
    page.one("input[type=search]").send_keys("held-out")
    page.until(lambda: [each.get_attribute("data-metric") for each in page.all("figure")] == ["eval/reward"])
    assert page.text("figure .last") == "0.75"
    assert describe("eval/reward").meaning in page.one("figure").get_attribute("title")
    page.go("metrics?run=0&from=10&to=20&search=own")
    assert "steps 10–20" in page.text(".controls")
    page.until(lambda: "10 to 20 over steps 10 to 20" in page.one("figure .chart").get_attribute("aria-label"))
    page.press("0")
    page.until(lambda: "over steps 1 to 40" in page.one("figure .chart").get_attribute("aria-label"))
    page.go("metrics?run=0&run=1")
    assert "--num-rollout" in page.text("section.card")
    page.until(lambda: [each.text for each in page.all("section.card mark")] == [str(STEPS), "50"])


def test_curves_are_smoothed_and_scaled(page: Page) -> None:
    page.go("metrics?run=0&search=own")
    drawn = lambda: page.driver.execute_script("return document.querySelector('figure canvas')?.toDataURL()")  # noqa: E731
    linear = page.until(drawn)
    page.one(".controls input[type=checkbox]").click()  # log scale
    page.until(lambda: drawn() not in (None, linear))
    page.one("input[aria-label=smoothing]").send_keys("\ue014" * 35)  # arrow right, each 0.02
    mean = reduce(lambda mean, step: 0.7 * mean + 0.3 * step, range(2, STEPS + 1), 1.0)
    curves = f"first, raw from 1 to {STEPS} over steps 1 to {STEPS}; first from 1 to {mean:.3g} "
    page.until(lambda: curves in page.one("figure .chart").get_attribute("aria-label"))


def test_dragging_over_a_chart_zooms_all(page: Page) -> None:
    page.go("metrics?run=0")
    page.until(lambda: len(page.all("figure .u-over")) > 3)
    chart = page.one("figure[data-metric='reward/mean'] .u-over")
    ActionChains(page.driver).move_to_element(chart).click_and_hold().move_by_offset(60, 0).release().perform()
    low, high = re.findall(r"\d+", page.text(".controls button"))
    assert 1 < int(low) < int(high) < STEPS
    curves = lambda: [each.get_attribute("aria-label") for each in page.all("figure .chart")]  # noqa: E731
    ranges = lambda: [words[1] for each in curves() if len(words := each.split(" over ")) > 1]  # noqa: E731
    page.until(lambda: len(ranges()) > 3 and {*ranges()} == {f"steps {low} to {high}"})


def test_attempts_are_found_and_their_story_is_told_from_a_sample(page: Page) -> None:
    page.go("attempts?run=0")
    found = lambda: [each.text for each in page.all("tbody td:first-child")]  # noqa: E731
    assert found() == ["4", "3", "2", "1"]
    page.one("select[aria-label='how it ended'] option[value=filtered]").click()
    page.until(lambda: found() == ["2", "1"])
    page.one("input[type=search]").send_keys("no such reason")
    page.until(lambda: "no attempt fits" in page.text("main"))
    page.go(SAMPLE)
    next(each for each in page.all(".links a") if each.text == "story of attempt 2").click()
    page.until(lambda: REASON in page.text(".story"))
    next(each for each in page.all("a") if each.text == "all attempts of this prompt").click()
    page.until(lambda: "prompts.jsonl%3A2" in page.driver.current_url and REASON in page.text(".story"))


def test_flags_are_searched_and_compared_with_a_preset(page: Page) -> None:
    page.go("flags?run=0")
    page.one("input[type=search]").send_keys("max-weight")
    rows = lambda: [each.text for each in page.all("tbody tr")]  # noqa: E731
    page.until(lambda: rows()[:1] == ["--max-weight-staleness none none"] and len(rows()) < 5)
    page.one("select[aria-label='compare with a preset'] option[value=staleness-2]").click()
    page.until(lambda: rows() == ["--max-weight-staleness none 2 none"])
    page.one("input[type=search]").clear()
    page.one("input[type=search]").send_keys(" ")
    page.until(lambda: [row.split()[0] for row in rows()] == DIFFERENT_FLAGS)


def test_lanes_are_walked_with_the_keyboard(page: Page) -> None:
    page.go("engines?run=0")
    assert page.text(".lane-names").split("\n") == ["trainer", "rank 0", "rank 1", "engine-0"]
    assert [cell.text for cell in page.all(".engines tbody td")[3:6]] == ["38 %", "7", "2"]
    canvas = page.one(".lanes canvas")
    canvas.send_keys("\ue012")  # arrow left
    page.until(
        lambda: (
            "all of it: trainer waiting for the batch 25 %"
            in page.text(".lanes output").replace("copying weights 75 %, ", "")
        )
    )
    canvas.send_keys("\ue015" + "\ue012" * 9)  # arrow down, arrow left
    page.until(lambda: "rank 0 forward and backward" in page.text(".lanes output"))
    drawn = (
        "return arguments[0].getContext('2d').getImageData(0, 0, arguments[0].width, 17).data.some((each) => each > 0)"
    )
    assert page.driver.execute_script(drawn, canvas)


def test_a_thousand_lanes_are_drawn_and_walked(tab: Page, tmp_path: Path) -> None:
    engine = EngineReport(state="serving", load=None, pauses=((1_076.0, 1_076.5),))
    report = EnginesReport(time=1_100.0, engines={f"engine-{number}": engine for number in range(1_000)})
    (write_finished_run(tmp_path / "run") / ENGINES_FILE).write_bytes(msgspec.json.encode(report))
    with served([tmp_path / "run"]) as base:
        tab.open(base, "engines?run=0")
        assert len(tab.all(".engines tbody tr")) == 1_000
        tab.one(".lanes canvas").send_keys("\ue015" * 1_100)  # arrow down
        tab.until(lambda: "engine-999 " in tab.text(".lanes output"))


def test_kinds_of_a_lane_differ_without_their_colours(page: Page) -> None:
    script = "import('/static/views/lanes.js').then(({ LOOKS }) => arguments[0](LOOKS))"
    looks = page.driver.execute_async_script(script)
    assert looks.keys() == KINDS.keys() - {IDLE}
    for letters in ("gue", "btpcso", "flakrtbpcso"):  # of an engine, the trainer, a rank
        shapes = {(looks[letter]["height"], looks[letter].get("striped", False)) for letter in letters}
        assert len(shapes) == len(letters)


def test_texts_of_the_run_stay_texts(page: Page) -> None:
    page.go(SAMPLE)
    shown = page.text(".message.assistant")
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in shown
    assert "⟨U+202E⟩evil⟨U+202C⟩ ⟨U+0000⟩⟨U+001B⟩[31m" in shown
    assert page.all("img") == []
    assert len(page.all("script")) == 1
    page.go("attempts?run=0")
    assert "<b>reward</b> raised" in page.text("main")
    page.go("logs?run=0&name=engine-0.0.log")
    assert "⟨U+001B⟩[2Jred green" in page.text(".log")


def test_logs_are_chosen_by_process_and_searched_in_one_and_in_all(page: Page) -> None:
    page.go("logs?run=0")
    assert [each.get_attribute("label") for each in page.all("optgroup")] == PROCESSES_OF_RUN
    search = page.one("input[type=search]")
    search.send_keys("BEGINS")
    page.until(lambda: "1 line matches" in page.text("main"))
    page.one("select[aria-label=process] option[value='']").click()
    page.until(lambda: "training begins" in page.text(".card"))
    search.send_keys("\ue003" * 6 + "r")  # backspaces
    page.until(lambda: {"rollout.log", "engine-0.0.log"} <= {each.text for each in page.all(".card h2")})
    next(each for each in page.all(".card h2 button") if each.text == "engine-0.0.log").click()
    page.until(lambda: "[2Jred" in page.text(".log"))
    assert "name=engine-0.0.log" in page.driver.current_url
    assert page.one("select[aria-label=process]").get_attribute("value") == "engine-0.0.log"


def test_the_keyboard_reaches_everything(page: Page) -> None:
    for number, view in enumerate(VIEWS, start=1):
        page.press(str(number))
        page.until(partial(is_shown, page, view))
    page.press("3")
    page.until(lambda: page.shown() == "samples")
    page.press("/")
    assert page.focused().get_attribute("type") == "search"
    page.press("\ue00c")  # escape
    page.driver.execute_script("document.querySelector('tbody tr').focus()")
    page.press("j")
    page.press("\ue015")  # arrow down
    page.press("k")
    page.press("\ue007")  # enter
    page.until(lambda: "Sample 1 of group 1" in page.text("main"))
    page.press("]")
    page.until(lambda: "Sample 2 of group 1" in page.text("main"))
    page.press("?")
    assert page.one("dialog").is_displayed()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_stand_out_in_both_themes(page: Page, theme: str) -> None:
    while page.driver.execute_script(THEME) != theme:
        page.one("header .quiet").click()
    for view in (*(f"{view}?run=0" for view in VIEWS), SAMPLE):
        page.go(view)
        assert hard_to_read(page) == []
    for mode in page.all("select[aria-label='shade tokens by'] option"):
        mode.click()
        assert hard_to_read(page) == []


def test_without_the_key_there_is_no_data(tab: Page, base: str) -> None:
    tab.driver.get("about:blank")
    tab.driver.get(base + "/")
    tab.driver.execute_script("sessionStorage.clear(); location.reload()")
    field = tab.one("input[type=password]")
    assert "first" not in tab.one_text()
    field.send_keys("wrong\n")
    tab.until(lambda: tab.all("input[type=password]") and tab.one("input[type=password]").get_attribute("value") == "")
    tab.one("input[type=password]").send_keys(KEY + "\n")
    tab.until(lambda: tab.shown() == "overview")
    assert KEY not in tab.driver.current_url


def write_live_run(directory: Path) -> Path:
    """A run on another machine, whose end is unknown here."""
    run_dir = write_finished_run(directory, ending=None)
    run = (run_dir / "run.json").read_text().replace('"host":"', '"host":"another-')
    (run_dir / "run.json").write_text(run)
    return run_dir


def test_what_a_run_writes_appears_by_itself(tab: Page, tmp_path: Path) -> None:
    run_dir = write_live_run(tmp_path / "live")
    config = (run_dir / "config.toml").read_text().replace(f"num-rollout = {STEPS}\n", "num-rollout = 100\n")
    (run_dir / "config.toml").write_text(config)
    with served([run_dir]) as base:
        tab.open(base)
        assert tab.text(".chip .state").startswith("? on another-")
        assert tab.text(".tile[data-name=step] b") == str(STEPS)
        assert tab.text(".tile[data-name='step time'] small") == "ETA 2:00"  # 60 steps of 2 s
        file = MetricsFile(run_dir / FILE_NAME)
        file.log({"reward/mean": 0.5, "time/step_seconds": 2.0}, step=STEPS + 1)
        file.finish()
        tab.until(lambda: tab.text(".tile[data-name=step] b") == str(STEPS + 1))
        assert tab.text(".tile[data-name='step time'] small") == "ETA 1:58"
        (run_dir / "summary.json").write_text('{"ending": "failed", "error": "no engine serves"}')
        tab.until(lambda: tab.text(".chip .state") == "✗ failed")
        tab.until(lambda: "no engine serves" in tab.text("main"))


def test_metrics_and_samples_that_come_later_appear_by_themselves(tab: Page, tmp_path: Path) -> None:
    run_dir = write_live_run(tmp_path / "live")
    samples = run_dir / "samples"
    files = samples.rename(tmp_path / "later")
    with served([run_dir]) as base:
        tab.open(base, "metrics?run=0&search=late")
        assert "no metric fits" in tab.text("main")
        file = MetricsFile(run_dir / FILE_NAME)
        file.log({"my/late": 7.0}, step=STEPS + 1)
        tab.until(lambda: [each.text for each in tab.all("figure[data-metric='my/late'] .last")] == ["7"])
        file.log({"my/late": 8.0}, step=STEPS + 2)
        file.finish()
        tab.until(lambda: tab.text("figure .last") == "8")
        tab.until(lambda: "from 7 to 8" in tab.one("figure .chart").get_attribute("aria-label"))
        tab.go("samples?run=0")
        assert not tab.all("tbody tr")
        files.rename(samples)
        tab.until(lambda: len(tab.all("tbody tr")) == 8)
        assert tab.one("input[aria-label=step]").get_attribute("value") == "30"


def test_the_timeline_is_saved_from_the_logs(tab: Page, base: str, tmp_path: Path) -> None:
    tab.open(base, "logs?run=0")
    tab.complaints()  # of earlier tests
    tab.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    next(each for each in tab.all(".files button") if each.text == "timeline.json.gz").click()
    tab.until((tmp_path / "timeline.json.gz").exists)
    assert len(read_trace(tmp_path / "timeline.json.gz").spans("trainer", "steps", "step")) == STEPS
    assert tab.complaints() == []


def test_settings_are_changed_from_the_flags_with_the_write_key(tab: Page, base: str, tmp_path: Path) -> None:
    run_dir = write_finished_run(tmp_path / "live")
    with live_run(run_dir) as changes, served([run_dir], "write-key") as address:
        tab.open(address, "flags?run=0", key="write-key")
        tab.complaints()  # of earlier tests
        line = tab.one("input[aria-label='changes, NAME=VALUE']")
        line.send_keys("lr=1e-5\n")
        tab.until(lambda: tab.text(".card pre[role=status]") == "lr 1e-06 → 1e-5, after step 7")
        assert tab.text(".card pre").startswith("lr 1e-5\n")
        assert tab.complaints() == []
        line.send_keys("magic=<b>1</b>\n")
        tab.until(lambda: tab.text(".card pre[role=status]") == "there is no setting magic")
        tab.open(address, "flags?run=0")
        assert not tab.all("input[aria-label='changes, NAME=VALUE']")
    assert changes == [{"lr": "1e-5"}]


@pytest.mark.parametrize("view", [*VIEWS, SAMPLE])
def test_a_phone_shows_it_without_scrolling_sideways(page: Page, view: str) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 375, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        page.go(view)
        width = page.driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= 375
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_report_opens_without_a_server(tab: Page, run_dir: Path, other_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(open_runs([run_dir, other_dir]), path)
    tab.driver.get("about:blank")
    tab.complaints()
    tab.requests()
    tab.driver.get(path.as_uri())
    tab.until(lambda: tab.shown() == "overview")
    assert tab.text(".tile[data-name=step] b") == str(STEPS)
    for view in (*VIEWS, SAMPLE, "attempts?run=0&subject=1", "metrics?run=0&run=1"):
        tab.go(view)
        assert "cannot be shown" not in tab.text("main")
    tab.go(SAMPLE)
    assert HOSTILE.split("\u202e")[0].strip() in tab.text(".message.assistant")
    tab.go("logs?run=0&name=rollout.log")
    tab.one("input[type=search]").send_keys("restarting")
    tab.until(lambda: "1 line matches" in tab.text("main"))
    assert tab.complaints() == []
    assert [url for url in tab.requests() if not url.startswith("data:")] == [path.as_uri()]

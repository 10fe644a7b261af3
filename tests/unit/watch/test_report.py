"""The report: one file that asks for nothing, with the data of the run as inert text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from miles_async.cli import main
from miles_async.observability.metrics_file import FILE_NAME, read_metrics
from miles_async.watch import report as module
from miles_async.watch.bundle import bundle
from miles_async.watch.report import report
from miles_async.watch.run import open_runs
from miles_async.watch.server import STATIC
from tests.unit.watch.run_files import HOSTILE, write_finished_run

DATA = re.compile(r'<script type="application/json" id="report-data">(.*?)</script>', re.S)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_finished_run(tmp_path / "run")


def data_of(text: str) -> dict[str, dict]:
    return json.loads(DATA.search(text)[1])


def test_it_holds_the_numbers_of_the_run(run_dir: Path) -> None:
    data = data_of(report(open_runs([run_dir])))
    rows = read_metrics(run_dir / FILE_NAME)
    assert data["series"][0]["reward/mean"]["values"] == [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert data["answers"]["overview?run=0"]["groups"]["issued"] == 4
    assert data["answers"]["samples?run=0&kind=train"]["step"] == 30
    sample = data["answers"]["sample?run=0&kind=train&step=30&attempt=2&sample=3"]
    assert sample["branches"][0]["conversation"][1]["text"] == HOSTILE


def test_texts_of_a_run_end_no_element(run_dir: Path) -> None:
    text = report(open_runs([run_dir]))
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "alert(1)<" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    assert "default-src 'none'; script-src 'sha256-" in policy
    assert "unsafe" not in policy


def test_it_asks_for_nothing(run_dir: Path) -> None:
    text = report(open_runs([run_dir]))
    assert "src=" not in re.sub(r"<script type=.*?</script>", "", text, flags=re.S).split("<style>")[0]
    assert not re.search(r'(?:src|href)="(?!data:)', text.split("<style>")[0])


def test_its_size_is_bounded(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = data_of(report(open_runs([run_dir])))["answers"]
    monkeypatch.setattr(module, "MOST_BYTES", 40_000)
    bounded = data_of(report(open_runs([run_dir])))["answers"]
    assert "overview?run=0" in bounded
    assert sum(len(json.dumps(answer)) for answer in bounded.values()) < 60_000
    in_full = [sum(path.startswith("sample?") for path in answers) for answers in (whole, bounded)]
    assert in_full[1] < in_full[0] / 2  # details are left out first


def test_several_runs_are_compared(run_dir: Path, tmp_path: Path) -> None:
    other = write_finished_run(tmp_path / "other", steps=50, ending=None)
    data = data_of(report(open_runs([run_dir, other])))
    assert data["answers"]["flags?run=0&run=1"]["columns"] == ["run", "other"]
    assert len(data["series"][1]["reward/mean"]["steps"]) == 50


def test_the_command_says_where_it_is(run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["report", str(run_dir)]) == 0
    assert str(run_dir / "report.html") in capsys.readouterr().out
    assert main(["report", str(run_dir), "--output", str(tmp_path / "absent" / "x.html")]) == 2
    assert not list(run_dir.glob("*.partial"))


def test_modules_become_one_script(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "main.js").write_text(
        'import { two as second } from "./sub/a.js";\nimport * as b from "./b.js";\nsecond();\n'
    )
    (tmp_path / "sub" / "a.js").write_text('import { one } from "../b.js";\nexport function two() { return one; }\n')
    (tmp_path / "b.js").write_text("export const one = 1;\n")
    text = bundle(tmp_path, "main.js")
    assert [text.index(f'modules["{name}"] =') for name in ("b.js", "sub/a.js", "main.js")] == sorted(
        text.index(f'modules["{name}"] =') for name in ("b.js", "sub/a.js", "main.js")
    )
    assert 'const { two: second } = modules["sub/a.js"];' in text
    assert not re.search(r"^(import|export)", text, re.M)


@pytest.mark.parametrize("line", ["export default 1;", 'import "./b.js";', "export { a };", 'export * from "./b.js";'])
def test_other_syntax_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "b.js").write_text("")
    (tmp_path / "main.js").write_text(f"const a = 1;\n{line}\n")
    with pytest.raises(ValueError, match=r"main\.js"):
        bundle(tmp_path, "main.js")


def test_a_circle_of_modules_is_refused(tmp_path: Path) -> None:
    (tmp_path / "main.js").write_text('import { a } from "./main.js";\n')
    with pytest.raises(ValueError, match="circle"):
        bundle(tmp_path, "main.js")


def test_the_page_fits_into_one_script() -> None:
    assert 'modules["main.js"] =' in bundle(STATIC, "main.js")

"""The staleness study: its cells are valid runs, finished cells are not run again, the report says what it found."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch

from examples.staleness_study import run_cell as running
from examples.staleness_study import study
from examples.staleness_study.cells import AGES, SEEDS, STEPS, Cell, exported, run_flags, study_cells
from examples.staleness_study.corrections import BY_NAME, CORRECTIONS, SMALL_STEPS, UNCORRECTED, Correction
from examples.staleness_study.report import ACCURACY, ESS, SPIKES, finished, table, verdict, verdicts, write_report
from examples.staleness_study.results import CellResult, Results
from examples.staleness_study.run_cell import CellFailedError, console_log, read_result
from miles_async.algorithms.objective import make_objective
from miles_async.algorithms.step_scale import LOG_SUMS, StepScale
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.validation import validate
from miles_async.observability.metrics_file import MetricsFile
from tests.unit.algorithms.cases import ours
from tests.unit.algorithms.steps import TARGET_VERSION, Step, micro_batch, random_step

ROOT = Path(__file__).parents[3]
CELLS = list(study_cells(1))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # argument files are found from there


def result(age: int, correction: str, greedy: float = 0.5, seed: int = 0) -> CellResult:
    cell = Cell(age=age, correction=correction, seed=seed)
    return CellResult(
        age=age,
        correction=correction,
        seed=seed,
        fingerprint=cell.fingerprint,
        greedy=greedy,
        sampled=greedy - 0.1,
        rewards=(0.5,) * STEPS,
        grad_norms=(1.0,) * STEPS,
        ess=(1.0,) * STEPS,
    )


# The cells


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_each_cell_is_a_valid_run_that_forces_its_age(cell: Cell, tmp_path: Path) -> None:
    prompts = tmp_path / "train.jsonl"  # that of the example is made when the study begins
    prompts.touch()
    parsed = parse_arguments([*run_flags(cell, Path("runs/study/x")), "--prompt-data", str(prompts)])
    validate(parsed.arguments, parsed.checks)
    arguments = parsed.arguments
    assert arguments.weights.debug_publication_lag == cell.age == arguments.staleness.bound
    assert arguments.staleness.lead == 1
    assert arguments.rollout.num_rollout == STEPS > 2 * cell.age
    assert arguments.algorithm.loss_aggregation == "token_mean"
    assert arguments.checkpoint.save_hf == exported(Path("runs/study/x"))


def test_a_round_has_every_cell_once_and_at_age_0_one_per_learning_rate() -> None:
    assert len(set(CELLS)) == len(CELLS) == 2 + (len(AGES) - 1) * len(CORRECTIONS)
    assert [cell.correction for cell in CELLS if cell.age == 0] == [UNCORRECTED.name, SMALL_STEPS.name]


def test_the_control_differs_from_no_correction_in_its_learning_rate_alone() -> None:
    plain, control = (
        parse_arguments(Cell(age=8, correction=one.name, seed=0).flags).arguments for one in (UNCORRECTED, SMALL_STEPS)
    )
    smaller = dataclasses.replace(plain.optimizer, lr=plain.optimizer.lr / 5)
    assert control == dataclasses.replace(plain, optimizer=smaller)
    assert [cell.seed for cell in study_cells(2)] == [0] * len(CELLS) + [1] * len(CELLS)


def on_policy_step() -> Step:
    """Engine, old and present policy agree, and tokens are of the version that the optimizer steps from."""
    return [
        dataclasses.replace(
            one,
            old=one.logprobs.detach(),
            rollout=one.logprobs.detach(),
            versions=torch.full_like(one.versions, TARGET_VERSION),
            advantages=one.advantages[:1].expand(len(one.old)),  # as groups give them
        )
        for one in random_step(0)
    ]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: correction.name)
def test_no_correction_changes_the_gradient_of_data_of_age_0(correction: Correction) -> None:
    def step_of(one: Correction) -> tuple[list[torch.Tensor], float]:
        arguments = parse_arguments(Cell(age=0, correction=one.name, seed=0).flags).arguments
        _, gradients = ours(on_policy_step(), make_objective(arguments.algorithm))
        scale = StepScale.of(arguments.optimizer)
        factor = 1.0 if scale is None else scale.factor(scale.sums(*micro_batch(on_policy_step()))[LOG_SUMS])
        return gradients, factor

    plain, _ = step_of(UNCORRECTED)
    gradients, factor = step_of(correction)
    assert factor == pytest.approx(1.0)
    assert any(gradient.any() for gradient in plain)
    for ours_, expected in zip(gradients, plain, strict=True):
        torch.testing.assert_close(ours_, expected, rtol=1e-9, atol=1e-12)


def test_a_fingerprint_changes_with_a_flag_of_a_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    preset = tmp_path / "own.args"
    preset.write_text("--tis-clip 3\n")
    monkeypatch.setitem(BY_NAME, "own", Correction(name="own", title="own", flags=("--use-tis", f"@{preset}")))
    cell = Cell(age=2, correction="own", seed=0)
    before = cell.fingerprint
    assert cell.fingerprint == before
    preset.write_text("--tis-clip 4\n")
    assert cell.fingerprint != before


def test_the_page_of_the_example_has_the_flags_of_every_correction() -> None:
    page = (ROOT / "examples/staleness_study/README.md").read_text()
    for correction in CORRECTIONS:
        assert f"| {correction.title} | `{' '.join(correction.flags)}` |" in page


# Results


def finish(run_dir: Path, steps: int = STEPS) -> None:
    file = MetricsFile(run_dir / "metrics.jsonl")
    for step in range(steps):
        norm = {} if step == 3 else {"train/grad_norm": 1.23456}
        file.log({"reward/mean": 0.5, "train/ess_sequences": 0.75, **norm}, step=step)
    file.log({"eval/reward": 0.1}, step=steps)  # a line without training is no step
    file.finish()


def test_a_result_has_the_numbers_of_each_step_and_none_where_nothing_was_learned_from(tmp_path: Path) -> None:
    cell = CELLS[1]
    finish(tmp_path)
    found = read_result(cell, tmp_path, greedy=0.8, sampled=0.7)
    assert found.cell == cell
    assert (found.greedy, found.sampled, found.last_ess) == (0.8, 0.7, 0.75)
    assert found.rewards == (0.5,) * STEPS
    assert found.grad_norms == (1.2346,) * 3 + (None,) + (1.2346,) * (STEPS - 4)
    assert found.fingerprint == cell.fingerprint


def test_half_a_run_is_no_result(tmp_path: Path) -> None:
    finish(tmp_path, steps=STEPS - 1)
    with pytest.raises(CellFailedError, match=f"expected {STEPS} steps .* found {STEPS - 1}"):
        read_result(CELLS[0], tmp_path, greedy=0.8, sampled=0.7)


def test_spikes_are_steps_beyond_twice_the_median_of_the_run() -> None:
    norms = (None, 1.0, 1.0, 1.0, 1.9, 2.1, None, 4.0, 1.0, 1.0, 1.0)
    assert msgspec.structs.replace(result(2, "cispo"), grad_norms=norms).spikes == pytest.approx(2 / 9)
    assert msgspec.structs.replace(result(2, "cispo"), grad_norms=(None,)).spikes == 0


def test_the_reward_at_the_end_is_that_of_the_last_ten_steps() -> None:
    rewards = (1.0,) * (STEPS - 10) + (0.25, 0.75) * 5
    assert msgspec.structs.replace(result(2, "cispo"), rewards=rewards).last_reward == 0.5


def test_the_data_file_keeps_one_result_per_cell_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "data.json"
    results = Results(path)
    for greedy in (0.1, 0.2):
        results.add(result(8, "cispo", greedy))
    results.add(result(2, "gspo", 0.3, seed=1))
    assert [one["correction"] for one in json.loads(path.read_text())] == ["gspo", "cispo"]
    assert len(path.read_text().splitlines()) == 4
    assert [one.greedy for one in Results(path).current(study_cells(2))] == [0.2, 0.3]


def test_a_result_of_other_flags_does_not_count(tmp_path: Path) -> None:
    results = Results(tmp_path / "data.json")
    results.add(msgspec.structs.replace(result(8, "cispo"), fingerprint="another"))
    assert results.current(CELLS) == []


def test_the_data_in_the_repository_can_be_read() -> None:
    Results(ROOT / "docs" / study.DATA_NAME)


# Running


@pytest.fixture
def _no_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "prepare", lambda task, directory: None)


@pytest.mark.usefixtures("_no_preparation")
def test_finished_cells_are_not_run_again_and_a_failing_one_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    broken = {"age8-gspo-seed0"}

    async def run_cell(cell: Cell, run_dir: Path) -> CellResult:
        ran.append(cell.name)
        assert run_dir == tmp_path / "runs" / cell.name
        if cell.name in broken:
            raise CellFailedError("exit code 7")
        return result(cell.age, cell.correction)

    monkeypatch.setattr(study, "run_cell", run_cell)
    arguments = ["--seeds", "1", "--jobs", "2", "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    assert study.main(arguments) == 1
    assert Counter(ran) == {cell.name: 3 if cell.name in broken else 1 for cell in CELLS}
    assert "age8-gspo-seed0: attempt 3 of 3 FAILED, exit code 7" in capsys.readouterr().out
    assert "Not finished yet" in (tmp_path / "staleness_study.md").read_text()
    ran.clear()
    broken.clear()
    assert study.main(arguments) == 0
    assert ran == ["age8-gspo-seed0"]
    assert "Not finished yet" not in (tmp_path / "staleness_study.md").read_text()


@pytest.mark.usefixtures("_no_preparation")
def test_an_interrupted_study_reports_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def run_cell(cell: Cell, run_dir: Path) -> CellResult:
        if cell.age:
            raise KeyboardInterrupt
        return result(cell.age, cell.correction, 0.875)

    monkeypatch.setattr(study, "run_cell", run_cell)
    assert study.main(["--docs", str(tmp_path)]) == 1
    assert "| no correction | 0.88 (1 of 3) | – |" in (tmp_path / "staleness_study.md").read_text()


class Process:
    """A run that ends when it is told to, or at once."""

    def __init__(self, returncode: int | None) -> None:
        self.returncode = returncode
        self.ended = asyncio.Event()

    async def wait(self) -> int:
        if self.returncode is None:
            await self.ended.wait()
            self.returncode = 130
        return self.returncode

    def terminate(self) -> None:
        self.ended.set()


async def test_a_cancelled_cell_stops_its_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process, started = Process(None), asyncio.Event()

    async def start(*command: str, **options: object) -> Process:
        started.set()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    task = asyncio.ensure_future(running.run_cell(CELLS[0], tmp_path / "run"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert process.returncode == 130


async def test_a_failed_run_shows_its_last_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def start(*command: str, stdout: object, **options: object) -> Process:
        console_log(tmp_path / "run").write_text("one\nError: no prompts\n")
        return Process(2)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(CellFailedError, match=r"exit code 2, its last lines:\n    one\n    Error: no prompts"):
        await running.run_cell(CELLS[0], tmp_path / "run")


async def test_a_run_that_hangs_is_a_failed_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = Process(None)

    async def start(*command: str, **options: object) -> Process:
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(running, "CELL_SECONDS", 0.02)
    with pytest.raises(CellFailedError, match=r"it took longer than 0\.02 s"):
        await running.run_cell(CELLS[0], tmp_path / "run")
    assert process.returncode == 130


# The report


def row(text: str, title: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {title} |")]
    return [entry.strip() for entry in line.strip("|").split("|")[1:]]


def test_table_averages_over_seeds_and_says_where_some_are_missing() -> None:
    runs = [result(2, "tis-token", 0.6, seed=seed) for seed in range(2)] + [result(2, "tis-token", 0.9, seed=2)]
    runs += [result(8, "tis-token", 0.5), result(8, "tis-token", 0.25, seed=1), result(16, "tis-token", 0.125)]
    found = row(table(runs, ACCURACY, 3), "TIS, token")
    assert found == ["", "0.70 (0.60–0.90)", "–", "0.38 (0.25–0.50; 2 of 3)", "0.12 (1 of 3)"]
    assert row(table(runs, SPIKES, 3), "TIS, token")[1:] == ["0 (0–0)", "–", "0 (0–0; 2 of 3)", "0 (1 of 3)"]
    assert row(table(runs, ESS, 3), "no correction") == ["–"] * len(AGES)


def test_verdict_tells_apart_only_what_differs_in_every_seed() -> None:
    greedy = {"none": (0.3, 0.4), "tis-token": (0.45, 0.5), "gspo": (0.35, 0.9), "cispo": (0.1, 0.2)}
    runs = [result(8, name, value, seed) for name, values in greedy.items() for seed, value in enumerate(values)]
    runs.append(result(8, "opsm", 0.9))  # one seed is no spread
    judged = {name: verdict(runs, BY_NAME[name], UNCORRECTED, 8) for name in [*greedy, "opsm"][1:]}
    assert judged == {"tis-token": "+", "gspo": "=", "cispo": "−", "opsm": "?"}
    assert verdict(runs, BY_NAME["gspo"], UNCORRECTED, 4) == "?"
    runs += [result(8, SMALL_STEPS.name, value, seed) for seed, value in enumerate((0.6, 0.7))]
    assert row(verdicts(runs), "TIS, token") == ["??", "??", "+−", "??"]
    assert row(verdicts(runs), SMALL_STEPS.title) == ["?", "?", "+", "?"]


def test_the_page_says_how_much_is_finished() -> None:
    runs = [result(cell.age, cell.correction, seed=cell.seed) for cell in study_cells(SEEDS)]
    combinations = len(CELLS)
    assert finished(runs, SEEDS) == f"Each of the {combinations} combinations of age and correction ran with 3 seeds."
    assert f"{combinations - 1} with 3 of 3 seeds, 1 with 2 of 3 seeds" in finished(runs[:-1], SEEDS)


def test_report_of_a_part_of_the_study_has_page_and_figure(tmp_path: Path) -> None:
    write_report([result(cell.age, cell.correction) for cell in CELLS[: 2 + len(CORRECTIONS)]], SEEDS, tmp_path)
    assert (tmp_path / "staleness_study.png").stat().st_size > 10_000
    page = (tmp_path / "staleness_study.md").read_text()
    assert row(page.split("Against")[0], "CISPO") == ["", "–", "–", "0.50 (1 of 3)", "–"]


def test_nothing_to_report_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["--report-only", "--docs", str(tmp_path)]) == 1
    assert "no cell is finished" in capsys.readouterr().err

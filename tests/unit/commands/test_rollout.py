"""``miles-async rollout`` and ``eval``: what is asked for, and what is made of the samples that are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import examples.environments
from miles_async.arguments import Arguments
from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.arguments.config_file import to_toml
from miles_async.arguments.evaluation_alone import evaluation_alone, rollout_as_evaluation
from miles_async.arguments.evaluation_sets import evaluation_sets
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.validation import flag_problems, validate
from miles_async.checkpoints.files import Checkpoint
from miles_async.cli import main
from miles_async.commands import rollout as command
from miles_async.commands.evaluation_report import REPORT_FILE, evaluated, report
from miles_async.errors import ConfigurationError
from miles_async.runs.config import Config
from miles_async.samples.columns import FileNote
from miles_async.samples.files import DIRECTORY, file_of
from tests.unit.commands.command_line import printed, refused
from tests.unit.samples.sample_rows import row, write_file

MODEL = "examples/quickstart/assets/reverse/model"
FLAGS = ("--hf-checkpoint", MODEL, "--rm-type", "exact_match", "--device", "cpu")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"rev {i}", "label": str(i)}) + "\n" for i in range(3)))
    return str(path)


def write_samples(
    run_dir: Path, rewards: dict[str, list[float]], *, name: str = "held_out", asked: int = 2, why: str | None = None
) -> Path:
    """Samples of an evaluation; a sample whose reward is negative is absent."""
    rows = [
        row(
            kind="eval", step=0, data_set=name, prompt_id=prompt, attempt_id=-1 - place, sample=number, samples=asked,
            reward=reward, target_version=None, age=None,
        )
        for place, (prompt, given) in enumerate(rewards.items())
        for number, reward in enumerate(given)
        if reward >= 0
    ]  # fmt: skip
    directory = run_dir / DIRECTORY
    directory.mkdir(parents=True)
    total = {name: asked * len(rewards)}
    note = FileNote(kind="eval", step=0, groups=len(rewards), groups_written=len(rewards), why_fewer=why, asked=total)
    write_file(file_of(directory, "eval", 0), note, rows)
    return run_dir


def test_rollout_samples_the_prompts_as_training_would(prompts: str) -> None:
    words = ["--prompt-data", prompts, "--n-samples-per-prompt", "4", "--rollout-temperature", "0.7"]
    words += ["--rollout-top-p", "0.9", "--rollout-max-response-len", "33", "--save", "checkpoints", "--save-hf", "hf"]
    arguments = evaluation_alone(rollout_as_evaluation(parse_arguments([*FLAGS, *words]).arguments))
    evaluation = arguments.evaluation
    assert evaluation.eval_prompt_data == (prompts,)
    assert (evaluation.n_samples_per_eval_prompt, evaluation.eval_temperature, evaluation.eval_top_p) == (4, 0.7, 0.9)
    assert arguments.rollout.rollout_max_response_len == 33
    assert (arguments.checkpoint.save, arguments.checkpoint.save_hf) == (None, None)
    assert arguments.sides == "rollout"
    validate(arguments)  # top-p, for one, is refused for training


def test_flags_that_only_training_has_to_fit_are_not_judged(prompts: str) -> None:
    words = ["--eval-prompt-data", prompts, "--rollout-batch-size", "7", "--global-batch-size", "3"]
    words += ["--eval-max-response-len", "20", "--max-tokens-per-gpu", "16"]
    arguments = parse_arguments([*FLAGS, *words]).arguments
    with pytest.raises(ConfigurationError, match="--global-batch-size"):
        validate(arguments)
    alone = evaluation_alone(arguments)
    validate(alone)
    assert alone.rollout.rollout_max_response_len == 20
    assert parse_arguments([*FLAGS, *words, "--eval-only"]).arguments.sides == "rollout"


def test_each_data_set_keeps_its_length_as_in_training(prompts: str, tmp_path: Path) -> None:
    config = tmp_path / "held_out.yaml"
    config.write_text(f"datasets: {{own: {{path: {prompts}, max_response_len: 50}}, other: {{path: {prompts}}}}}")
    arguments = parse_arguments([*FLAGS, "--eval-config", str(config), "--rollout-max-response-len", "30"]).arguments
    for each in (arguments, alone := evaluation_alone(arguments)):
        lengths = [
            data_set.response_length(each.evaluation, each.rollout)[1] for data_set in evaluation_sets(each.evaluation)
        ]
        assert lengths == [50, 30]
    assert alone.rollout.rollout_max_response_len == 50
    assert evaluation_alone(alone) == alone


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--rm-type", "none"), "no reward: give --rm-type"),
        (("--save-samples", "0"), "--save-samples 0 with --eval-only"),
        (("--colocate",), "--colocate with --eval-only"),
        (("--rollout-num-gpus-per-engine", "8"), "--rollout-num-gpus 1 is not a multiple of"),
        (("--rollout-external", "http://a:1"), "--rollout-external with --eval-only"),
        (("--n-samples-per-eval-prompt", "2", "--eval-temperature", "0"), "all of them would be equal"),
    ],
)
def test_what_evaluation_cannot_follow_is_refused(prompts: str, flags: tuple[str, ...], expected: str) -> None:
    arguments = evaluation_alone(parse_arguments([*FLAGS, "--eval-prompt-data", prompts, *flags]).arguments)
    with pytest.raises(ConfigurationError, match=expected):
        validate(arguments)


def test_the_flags_of_a_run_that_evaluates_may_be_given_to_rollout(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "held_out.yaml").write_text(f"eval: {{datasets: [{{name: a, path: {prompts}}}]}}")
    held_out = ("--eval-prompt-data", "b", prompts, "--eval-config", str(tmp_path / "held_out.yaml"))
    words = (*FLAGS, "--prompt-data", prompts, *held_out, "--eval-interval", "5", "--eval-temperature", "0")
    arguments = evaluation_alone(rollout_as_evaluation(parse_arguments(words).arguments))
    validate(arguments)
    (data_set,) = evaluation_sets(arguments.evaluation)
    assert data_set.path == prompts
    assert main(["rollout", *words, "--print-config"]) == 0
    assert "note: `miles-async rollout` samples --prompt-data; --eval-prompt-data" in capsys.readouterr().out


def test_each_command_has_its_prompts(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", *FLAGS, "--eval-prompt-data", prompts]) == 2
    assert "--prompt-data is required: prompts to sample, .jsonl or .parquet; `miles-async eval` evaluates" in (
        capsys.readouterr().err
    )
    assert "--prompt-data is required" in refused(capsys, "rollout", *FLAGS)
    assert "--eval-config or --environment-eval-prompts is required" in refused(capsys, "eval", *FLAGS)


def test_prompts_of_an_environment_are_sampled_and_its_held_out_ones_evaluated(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(examples.environments.__file__).parent)
    asked: list[Arguments] = []

    def train_config(config: Config, show: object) -> int:
        asked.append(config.arguments)
        return 1

    monkeypatch.setattr(command, "train_config", train_config)
    game = ("--environment", "gymnasium:gymnasium_reverse:Reverse-v0", "--environment-prompts", "3")
    words = (*FLAGS[:2], "--device", "cpu", *game, "--run-dir", str(tmp_path / "run"))
    assert main(["rollout", *words]) == 1
    assert main(["eval", *words, "--environment-eval-prompts", "2"]) == 1
    assert main(["eval", *words, "--eval-prompt-data", "own", prompts]) == 1
    sets, names = [], []
    for arguments in asked:
        validate(arguments)
        (data_set,) = evaluation_sets(arguments.evaluation)
        names.append(data_set.name)
        sets.append([json.loads(line)["prompt"] for line in Path(data_set.path).read_text().splitlines()])
    trained, held_out, own = sets
    assert names == ["gymnasium-gymnasium_reverse-Reverse-v0", "environment", "own"]
    assert (len(trained), len(held_out), own) == (3, 2, ["rev 0", "rev 1", "rev 2"])
    assert not {*trained} & {*held_out}


TRACKED = ("--use-wandb", "--use-tensorboard", "--use-prometheus", "--use-mlflow", "--use-swanlab", "--use-trackio")


@pytest.mark.parametrize(
    "training",
    [
        ("@examples/quickstart/reverse.args", "--eval-interval", "5"),
        ("@examples/quickstart/reverse.args", "--eval-only", "--save-debug-rollout-data", "{rollout_id}.parquet"),
        ("@examples/quickstart/sft.args", "--rm-type", "exact_match"),
    ],
)
def test_a_checkpoint_is_exported_by_a_run_that_saves_restarts_and_tracks_nothing(
    tmp_path: Path, prompts: str, monkeypatch: pytest.MonkeyPatch, training: tuple[str, ...]
) -> None:
    checkpoint = Checkpoint(directory=tmp_path / "checkpoints" / "iter_4", run="run", step=4)
    exports: list[Arguments] = []

    def train(words: list[str]) -> int:
        exports.append(parse_arguments(words[words.index("train") + 1 :]).arguments)
        return 0

    def evaluate(config: Config, show: object) -> int:
        assert config.arguments.model.hf_checkpoint == tmp_path / "run.hf"
        assert flag_problems(config.arguments) == []
        return 130

    monkeypatch.setattr(command, "find_checkpoint", lambda load: checkpoint)
    monkeypatch.setattr(command, "_finished", train)
    monkeypatch.setattr(command, "train_config", evaluate)
    saving = ("--save", "checkpoints", "--save-interval", "5", "--save-keep-last", "2", "--max-run-restarts", "3")
    loading = ("--load", "checkpoints", "--load-anyway", "prompt_data", "--eval-prompt-data", prompts)
    places = ("--run-dir", str(tmp_path / "run"), "--custom-tracker-path", "mine:Tracker")
    assert main(["eval", *training, *saving, *TRACKED, *loading, *places]) == 130
    (export,) = exports
    assert flag_problems(export) == []
    assert export.sides == "trainer"
    assert export.debug.exports
    assert export.checkpoint == CheckpointArguments(
        load=checkpoint.directory, load_anyway=("prompt_data",), save_hf=tmp_path / "run.hf"
    )
    assert export.observability == ObservabilityArguments(run_dir=tmp_path / "run.export")


def test_the_directory_of_a_training_run_is_not_moved_aside(
    tmp_path: Path, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "trained"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(to_toml(parse_arguments(FLAGS).arguments))
    words = ["eval", *FLAGS, "--eval-prompt-data", prompts, "--run-dir", str(run_dir)]
    assert main(words) == 2
    assert f"--run-dir {run_dir}-eval" in capsys.readouterr().err
    alone = evaluation_alone(parse_arguments([*FLAGS, "--eval-prompt-data", prompts]).arguments)
    (run_dir / "config.toml").write_text(to_toml(alone))
    command._keep_training(run_dir)


def test_a_report_has_estimates_per_data_set_and_the_paired_difference(
    tmp_path: Path, prompts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write_samples(tmp_path / "before", {f"p{i}": [0.0, float(i % 2)] for i in range(10)})
    after = tmp_path / "after"

    def pretend(config: object, show: object) -> int:
        write_samples(after, {f"p{i}": [1.0, float(i % 3 == 0)] for i in range(12)})
        return 0

    monkeypatch.setattr(command, "train_config", pretend)
    words = ["eval", *FLAGS, "--eval-prompt-data", prompts, "--run-dir", str(after), "--against", str(before)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "held_out: 12 prompts, 24 samples\n" in shown
    assert f"held_out, minus {before} (10 prompts in both):" in shown
    assert "pass@1    0.667" in shown
    assert "pass@2    1.000   0.758 to 1.000" in shown  # Wilson: 12 / (12 + 1.96²)
    assert "95% intervals over prompts" in shown
    record = json.loads((after / REPORT_FILE).read_text())
    assert record["data_sets"]["held_out"]["estimates"]["pass@1"]["mean"] == pytest.approx(2 / 3)
    difference = record["against"]["data_sets"]["held_out"]["pass@1"]
    expected = [(1 + (i % 3 == 0)) / 2 - (i % 2) / 2 for i in range(10)]
    assert difference["mean"] == pytest.approx(sum(expected) / 10)
    assert difference["low"] < difference["mean"] < difference["high"]


def test_samples_that_failed_are_counted_and_their_prompts_kept(tmp_path: Path) -> None:
    found = evaluated(write_samples(tmp_path / "run", {"a": [1.0, -1.0], "b": [0.0, 0.0], "c": [-1.0, -1.0]}))
    assert found.data_sets["held_out"].rewards == {"a": [1.0], "b": [0.0, 0.0]}
    text, record = report(found)
    assert "2 prompts, 3 samples, 3 failed or not done\n" in text
    assert record["data_sets"]["held_out"]["missing_samples"] == 3


def test_an_evaluation_whose_samples_all_failed_says_so(tmp_path: Path) -> None:
    found = evaluated(write_samples(tmp_path / "run", {"a": [-1.0, -1.0]}))
    assert "held_out: 0 prompts, 0 samples, 2 failed or not done\n" in report(found)[0]


def test_of_an_interrupted_evaluation_only_prompts_with_all_samples_count(tmp_path: Path) -> None:
    why = "the evaluation was interrupted"
    found = evaluated(write_samples(tmp_path / "run", {"a": [1.0, -1.0], "b": [0.0, 0.0]}, why=why))
    assert found.data_sets["held_out"].rewards == {"b": [0.0, 0.0]}
    text, _ = report(found)
    assert text.startswith(f"not all of it: {why}\n")
    assert "1 prompts without all of their samples left out" in text


def test_an_evaluation_that_was_ended_before_a_sample_says_so_by_its_status(
    tmp_path: Path, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "train_config", lambda config, show: 130)
    words = ["eval", *FLAGS, "--eval-prompt-data", prompts, "--run-dir", str(tmp_path / "run")]
    assert main(words) == 130


def test_a_flag_without_its_value_is_refused(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *FLAGS, "--eval-prompt-data", prompts, "--against"]) == 2
    assert "--against: expected one argument; see miles-async eval --help" in capsys.readouterr().err


def test_help_names_the_flags_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rollout", "eval"):
        assert "--against RUN_DIR" in printed(capsys, name, "--help")


@pytest.mark.parametrize(("name", "expected"), [("absent", "no directory"), ("empty", "no samples of an evaluation")])
def test_a_wrong_run_to_compare_with_is_noticed_first(
    tmp_path: Path, prompts: str, capsys: pytest.CaptureFixture[str], name: str, expected: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert expected in refused(capsys, "eval", *FLAGS, "--eval-prompt-data", prompts, "--against", str(tmp_path / name))


def test_runs_without_a_common_data_set_are_not_compared(
    tmp_path: Path, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write_samples(tmp_path / "before", {"a": [1.0, 1.0]}, name="gsm8k")
    assert main(["eval", *FLAGS, "--eval-prompt-data", prompts, "--against", str(before)]) == 2
    assert "has the data sets gsm8k, and this evaluation held_out" in capsys.readouterr().err

"""The whole loop, real: Megatron, SGLang, smg and Ray, from the command line to the summary."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from miles_async.observability.metric_names import describe
from miles_async.samples.reader import read_note, read_rows, samples_files
from miles_async.watch.run import Run
from miles_async.wiring.replay import Replay
from tests.integration.real_run import (
    REVERSE,
    ROOT,
    RealRun,
    real_run,
    shared_memory,
    traceback_in,
)
from tests.integration.tiny_models import save_tiny

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

RUN_SECONDS = 300.0  # for a run of a few steps, start included, on a busy machine
ONE_EACH = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1")
NOT_METRICS = {"kind", "step", "time"}
NO_EVALUATION = ("--eval-prompt-data", "none", "--eval-interval", "none")

SPECIAL = re.compile(r"</?\|?\w+\|?>")  # <eos>, <|user|>, </call>; a text may have < alone


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """An asynchronous run that lost an engine and came to its end; with checkpoints beside its directory."""
    root = tmp_path_factory.mktemp("runs")
    flags = ("--num-rollout", "12", "--max-weight-staleness", "2", "--max-rollout-lead", "3", "--record")
    with real_run(root / "async", *flags, "--save", str(root / "checkpoints"), "--use-wandb") as run:
        run.wait_for_steps(2, RUN_SECONDS)
        engines = run.engine_processes()
        assert len(engines) == 2
        assert [shared_memory(engine) for engine in engines] == [set(), set()]
        engines[0].kill()
        assert run.wait(RUN_SECONDS) == 0, run.output
        run.assert_nothing_left()
    return run


def test_asynchronous_run_learns_survives_an_engine_and_accounts_for_everything(learned: RealRun) -> None:
    # covers: C1, C2, C3, C8, C10, M2, M3, M6, M12, R4, P9, C7
    run, summary, steps = learned, learned.summary, learned.steps
    assert summary["steps"] == 12
    assert summary["weight_version"] == 12
    assert summary["reward_last"] > summary["reward_first"] + 0.15
    assert summary["eval_reward_last"] > summary["eval_reward_first"]
    # C1, from the versions of the tokens that were trained; and it really was asynchronous
    assert 1 <= summary["age_max"] <= 2
    assert sum(summary["age_histogram"].values()) == 12 * 16 * 8
    # C2
    groups = summary["groups"]
    assert groups["trained"] == 12 * 16
    assert groups["issued"] == sum(count for name, count in groups.items() if name != "issued")
    assert groups["in_flight"] == groups["buffered"] == 0
    # the same weights on both sides
    assert summary["logprob_diff"]["max"] < 1e-4
    assert summary["publish"]["count"] == 13
    assert all(step["publish/canary_difference"] < 1e-3 for step in steps)
    assert not [name for step in steps for name in step.keys() - NOT_METRICS if not describe(name).meaning]
    # what generation noted, and the router
    assert 0 < steps[-1]["rollout/prefix_cache_hit_rate"] < 1
    # the dead engine was noticed, and nobody else
    log = [json.loads(line) for line in (run.run_dir / "logs" / "rollout.log").read_text().splitlines()]
    fenced = [entry for entry in log if entry["event"] == "engine fenced"]
    assert fenced
    assert {entry["engine"] for entry in fenced} == {fenced[0]["engine"]}
    for name in ("reward.png", "config.toml", "metrics.jsonl", "wandb"):
        assert (run.run_dir / name).exists(), name
    assert_samples_are_kept(run)
    assert_replay_is_identical(run)


def assert_samples_are_kept(run: RealRun) -> None:
    """Two groups of every step and the evaluations, each token with its text, version and advantage."""
    files = samples_files(run.run_dir)
    assert [file.step for file in files if file.kind == "train"] == [*range(1, 13)]
    assert [file.step for file in files if file.kind == "eval"] == [0, 10, 12]
    for file in files:
        rows, note = read_rows(file.path), read_note(file.path)
        assert (note.groups, note.groups_written) == ((16, 2) if file.kind == "train" else (256, 256))
        assert len({row.attempt_id for row in rows}) == note.groups_written
        for row in rows:
            assert row.turns[0].seconds is not None
            sampled = "".join(row.token_texts[row.prompt_length :])  # a model that has learned little may say <bos>
            assert SPECIAL.sub("", sampled).startswith(SPECIAL.sub("", row.response))
            assert max(age or 0 for age in row.ages()) == (row.age or 0) <= 2
            assert (row.advantages is not None) == (file.kind == "train")
            trained = file.kind == "train" and row.filtered is None
            assert (row.trainer_logprobs is not None) == trained
            if trained and row.age == 0:
                assert row.logprob_difference < 1e-4


def assert_replay_is_identical(run: RealRun) -> None:
    """Every decision and every batch of the run, made again from its schedule; and it is what the trainer reported."""
    # covers: C11
    replay = Replay.of_run(run.run_dir)
    batches = list(replay)
    assert replay.complete
    assert len(batches) == len(run.steps)
    for batch, step in zip(batches, run.steps, strict=True):
        assert batch.step == step["step"]
        assert batch.target_version == step["weight_version/trainer"]
        assert float(batch.batch.rewards.mean()) == step["reward/mean"]
        assert sum(batch.shards[0].loss_tokens) == step["train/loss_tokens"]
        assert batch.batch.weight_versions.max() == step["weight_version/max"]


@pytest.mark.long
def test_a_resumed_run_may_be_on_policy(learned: RealRun, tmp_path: Path) -> None:
    # covers: C9, R11, P3, C11
    checkpoints = learned.run_dir.with_name("checkpoints")
    flags = ("--num-rollout", "14", "--load", str(checkpoints), "--on-policy", "--rollout-num-gpus", "1")
    with real_run(tmp_path / "resumed", *flags, "--record") as run:
        assert run.wait(RUN_SECONDS) == 0, run.output
        run.assert_nothing_left()
    assert [step["step"] for step in run.steps] == [13, 14]
    assert run.summary["weight_version"] == 14
    assert run.summary["age_histogram"] == {"0": 2 * 16 * 8}  # strictly in turn
    assert run.summary["reward_first"] > 0.3  # the weights came back: the warm start alone has 0.14
    assert run.summary["groups"]["trained"] == 14 * 16  # the ledger goes on, too
    assert run.summary["balanced"]
    assert_replay_is_identical(run)


@pytest.mark.long
def test_tensor_parallel_in_place_and_several_optimizer_steps(tmp_path: Path) -> None:
    # covers: M11, C8
    flags = ("--num-rollout", "4", "--tensor-model-parallel-size", "2", "--pause-generation-mode", "in_place")
    flags += ("--global-batch-size", "64", "--no-use-rollout-logprobs", "--use-tis", "--update-weights-interval", "2")
    with real_run(tmp_path / "run", *flags, "--rollout-num-gpus", "1", *NO_EVALUATION) as run:
        assert run.wait(RUN_SECONDS) == 0, run.output
        run.assert_nothing_left()
    summary = run.summary
    assert summary["logprob_diff"]["max"] < 1e-4
    assert summary["weight_version"] == 1  # after step 2; the last step's weights nobody would use
    assert summary["age_max"] <= 2


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5-moe", "nemotron-h", "nemotron-h-moe"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_hybrid_model_is_trained_and_published(family: str, mode: str, tmp_path: Path) -> None:
    """Gated delta nets and Mamba-2: engines hold what is trained, and their log-probs are the trainer's, after each
    publication, which finds requests under way.
    """
    # covers: C8, M11
    model = save_tiny(family, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "examples/quickstart/assets/reverse/model" / name, model)
    flags = ("--num-rollout", "4", "--hf-checkpoint", str(model), "--pause-generation-mode", mode)
    flags += ("--verify-weights", "full", "--rollout-max-response-len", "40", "--rollout-batch-size", "4")
    with real_run(tmp_path / "run", *flags, *ONE_EACH, *NO_EVALUATION, "--save", str(tmp_path / "saved")) as run:
        assert run.wait(RUN_SECONDS) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["weight_version"] == 3  # the last step's weights nobody would use
    assert run.summary["age_max"] >= 1
    assert run.summary["logprob_diff"]["max"] < 1e-4
    assert run.summary["publish"]["count"] == 4
    assert all(step["publish/canary_difference"] < 1e-3 for step in run.steps[:-1])


def ctrl_c(run: RealRun) -> None:
    run.process.send_signal(signal.SIGINT)


def test_rolling_publications_from_two_pipeline_stages_until_it_is_interrupted(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    """A process group of each stage with each engine; then Ctrl-C."""
    # covers: C8, C10
    flags = ("--num-rollout", "1000", "--publish-order", "rolling", "--max-weight-staleness", "1", *NO_EVALUATION)
    flags += ("--pipeline-model-parallel-size", "2")
    with real_run(tmp_path / "run", *flags, command=imported_reverse) as run:
        run.wait_for_steps(4, RUN_SECONDS)
        for process in run.processes():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                assert process.nice() == psutil.Process().nice(), "one side comes first"
        ctrl_c(run)
        assert_interrupted(run)
    summary = run.summary
    assert summary["age_max"] <= 1
    assert "engine fenced" not in (run.run_dir / "logs" / "rollout.log").read_text()
    parts = [f"publish/{name}_seconds" for name in ("pausing", "flush", "send", "compare", "resume")]
    for step in run.steps[:-1]:  # two engines one after the other: what is done in pauses takes longer than one of them
        pause = step["publish/pause_seconds"]  # of each engine, in which time may pass in which nothing is done
        assert pause < sum(step[part] for part in parts) < 2.05 * pause
    known = Run(run.run_dir, "run")
    engines, ranks = known.engines(), known.ranks()
    assert engines is not None
    assert ranks is not None
    pauses = sorted(pause for engine in engines.engines.values() for pause in [*engine.pauses][1:] if pause[1])
    assert len(pauses) >= 4  # the first ones were of engines that joined, together
    assert all(before[1] <= after[0] for before, after in pairwise(pauses))
    assert {len(step) for step in ranks.steps} == {2}


def assert_interrupted(run: RealRun) -> None:
    """The run ends within a minute, says what was done, and leaves nothing."""
    assert run.wait(60) == 130, run.output
    run.assert_nothing_left()
    assert not traceback_in(run.output), run.output
    summary = run.summary
    assert summary["ending"] == "interrupted"
    assert summary["steps"] >= 2
    assert summary["logprob_diff"]["max"] < 1e-4
    log = [json.loads(line) for line in (run.run_dir / "logs" / "driver.log").read_text().splitlines()]
    [staged] = [Path(entry["directory"]) for entry in log if entry["event"] == "weights are staged"]
    assert staged.parent == Path("/dev/shm")
    assert not staged.exists()
    assert summary["balanced"]
    assert summary["groups"]["cancelled"] > 0
    assert summary["groups"]["in_flight"] == 0


def stop_command(run: RealRun) -> None:
    """Stop a run with ``miles-async stop``, which sends SIGTERM."""
    command = [sys.executable, "-m", "miles_async", "stop", str(run.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout == f"stopping the run in {run.run_dir} (process {run.process.pid})\n"


OBJECT_STORE = ("--weight-transport", "object_store")
DISK_DELTA = ("--weight-transport", "disk", "--weight-delta", "xor", "--verify-weights", "full")


@pytest.mark.long
@pytest.mark.parametrize(("interrupt", "transport"), [(ctrl_c, OBJECT_STORE), (stop_command, DISK_DELTA)])
def test_interruption_stops_cleanly_with_every_transport(
    interrupt: Callable[[RealRun], None], transport: tuple[str, ...], tmp_path: Path
) -> None:
    # covers: C10, C8
    flags = ("--num-rollout", "1000", "--pause-generation-mode", "abort", *transport)
    with real_run(tmp_path / "run", *flags, in_background=interrupt is stop_command) as run:
        run.wait_for_steps(2, RUN_SECONDS)
        interrupt(run)
        assert_interrupted(run)


@pytest.mark.long
def test_a_run_survives_a_reward_that_cancels_everything_and_says_that_its_directory_is_gone(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    # covers: C6, C10
    reward = ("--rm-type", "none", "--custom-rm-path", "tests.integration.cancelling_reward:reward")
    flags = (*ONE_EACH, *NO_EVALUATION, "--num-rollout", "1000", *reward)
    with real_run(tmp_path / "run", *flags, command=imported_reverse) as run:
        run.wait_for_steps(2, RUN_SECONDS)
        log = (run.run_dir / "logs" / "rollout.log").read_text()
        assert "reward cancels a task that it did not start" in log, log
        shutil.rmtree(run.run_dir)
        assert run.wait(60) == 1, run.output
        assert f"error: --run-dir {run.run_dir} was removed, moved or replaced during the run" in run.output
        assert not traceback_in(run.output), run.output
        run.assert_nothing_left()


def test_sigterm_to_the_group_ends_a_start_within_seconds(tmp_path: Path) -> None:
    """As ``timeout``, scancel and systemd send it: Ray's own processes get it, too. Before that, another run wants the
    same directory.
    """
    # covers: C10
    with real_run(tmp_path / "run", *ONE_EACH) as run:
        run.wait_for_output("starting engines", RUN_SECONDS)
        command = [*REVERSE, "--run-dir", str(run.run_dir)]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert second.returncode == 2
        assert f"belongs to a run that is under way: process {run.process.pid} on " in second.stderr
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.wait(30) == 130, run.output
        run.assert_nothing_left()
    assert not traceback_in(run.output), run.output
    assert run.summary["ending"] == "interrupted"


def test_engine_that_does_not_come_up_is_an_error_with_its_last_words(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    # covers: C10, A7
    flags = ("--sglang-mem-fraction-static=-1", *ONE_EACH)
    with real_run(tmp_path / "run", *flags, command=imported_reverse) as run:
        assert run.wait(RUN_SECONDS) == 1
        run.assert_nothing_left()
    assert re.search(r"^error: engine-\d \(SGLang, .* ended with status", run.output, re.MULTILINE), run.output
    assert "--mem-fraction-static" in run.output  # in SGLang's own words
    assert not traceback_in(run.output.partition("error:")[0]), run.output

"""Checkpoints of a run on disk: whose they are, which one is meant, which are kept, what is refused before a start.

# covers: C9
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.arguments.model import ModelArguments
from miles_async.checkpoints.files import expendable, find_checkpoint, list_checkpoints
from miles_async.checkpoints.manifest import RunIdentity, fingerprint, least_bytes, new_run_name, write_manifest
from miles_async.checkpoints.run_checkpoints import RunCheckpoints
from miles_async.checkpoints.start import checkpoint_problems, kept_settings, resumption_notes, where_to_resume
from miles_async.errors import CheckpointError
from miles_async.ledger.readmission import request_readmission
from miles_async.runtime import clock
from miles_async.runtime.files.digests import digest_pieces, split, write_digested
from miles_async.seams import Position, Resumption
from miles_async.types import KeptSetting

MODEL = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2}
RANKS = {"DP": 2, "TP": 1, "PP": 1, "EP": 1}


class Side:
    """Trainer and rollout side: each writes a file, and counts what it loads."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []
        self.fails: Exception | None = None

    async def snapshot(self) -> None: ...

    async def save(self, directory: Path) -> dict[str, str]:
        if self.fails is not None:
            raise self.fails
        await asyncio.to_thread(directory.mkdir, exist_ok=True)
        return {"state": await asyncio.to_thread(write_digested, directory / "state", b"x" * 100)}

    async def stage_save(self, directory: Path) -> None:
        self.staged = directory

    async def write_save(self) -> dict[str, str]:
        return await self.save(self.staged)

    async def digests(self, directory: Path, sizes: dict[str, int]) -> dict[str, str]:
        return await asyncio.to_thread(digest_pieces, directory, split(sizes))

    async def load(self, directory: Path, *_: Resumption, **__: object) -> None:
        if self.fails is not None:
            raise self.fails
        self.loaded.append(directory)


def run_checkpoints(run: str, side: Side | None = None, *, ranks: Any = None, **flags: object) -> RunCheckpoints:
    side = side or Side()
    identity = RunIdentity(run=run, model=MODEL, ranks=ranks or RANKS)
    return RunCheckpoints(side, side, CheckpointArguments(**flags), identity)  # type: ignore[arg-type]


async def save(run: str, *steps: int, **flags: object) -> None:
    """One process of ``run``: it resumes if it is told to, then saves after each of ``steps``."""
    checkpoints = run_checkpoints(run, **flags)
    await checkpoints.load()
    for step in steps:
        await checkpoints.save(Position(step=step, version=step))
        await checkpoints.finish()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def steps(directory: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(directory)]


def problems(model: Any = MODEL, *, overwrite: bool = False, least_bytes: int = 0, **paths: Path) -> list[str]:
    flags: Any = {"save": None, "load": None} | paths
    return list(checkpoint_problems(**flags, overwrite=overwrite, model=model, least_bytes=least_bytes))


# --------------------------------------------------------------------------------------------- names and owners
async def test_the_newest_is_the_highest_number_and_other_names_are_ignored(tmp_path: Path) -> None:
    await save("mine", 9, 10, save=tmp_path)
    await save("mine", 10_000_000, save=tmp_path)  # sorts before iter_9999999 as text
    await save("mine", 9_999_999, save=tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "iter_9999999").rename(tmp_path / "iter_9999999")
    for other in ("iter_latest", "iter_00000099.backup", "iter_12x", "iter_"):
        (tmp_path / other).mkdir()
    (tmp_path / "iter_99999999").touch()  # no directory
    assert find_checkpoint(tmp_path).directory == tmp_path / "iter_10000000"


async def test_load_takes_one_checkpoint_by_its_own_directory(tmp_path: Path) -> None:
    await save("mine", 10, 20, 30, save=tmp_path)
    side = Side()
    position = await run_checkpoints("another", side, load=tmp_path / "iter_0000020").load()
    assert position == Position(step=20, version=20)
    assert side.loaded == [tmp_path / "iter_0000020" / "trainer", tmp_path / "iter_0000020"]


async def test_position_json_names_the_run_which_a_resumed_run_keeps(tmp_path: Path) -> None:
    await save("first", 10, save=tmp_path)
    await save("second", 20, save=tmp_path, load=tmp_path)
    await save("branch", 30, save=tmp_path / "branch", load=tmp_path)
    assert [checkpoint.run for checkpoint in list_checkpoints(tmp_path)] == ["first", "first"]
    assert find_checkpoint(tmp_path / "branch").run == "branch"
    assert json.loads((tmp_path / "iter_0000020" / "position.json").read_text())["run"] == "first"


async def test_checkpoints_of_two_runs_in_one_directory_are_never_guessed_about(tmp_path: Path) -> None:
    await save("old", 40, save=tmp_path / "old")
    await save("new", 10, save=tmp_path)
    (tmp_path / "old" / "iter_0000040").rename(tmp_path / "iter_0000040")  # by hand
    with pytest.raises(
        CheckpointError, match=r"expected the checkpoints of one run, found those of 2 \(iter_0000010 of"
    ):
        find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path / "iter_0000010").run == "new"


@pytest.mark.parametrize("name", [".", "iter_0000010"])
async def test_a_directory_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await save("theirs", 10, save=tmp_path)
    stat = os.stat

    def refuse(path: str | Path, **options: Any) -> os.stat_result:
        if Path(path).is_relative_to(tmp_path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)  # root may read everything
    load = tmp_path / name
    [problem] = problems(load=load)
    assert problem.startswith(f"--load {load}: cannot be read: [Errno 13] Permission denied")
    assert list(resumption_notes(load, 8)) == []
    assert kept_settings(load) == {}
    assert where_to_resume(load, load) == load


def test_run_names_are_unique() -> None:
    assert new_run_name(Path("runs/latest")).startswith("latest-")
    assert new_run_name(Path("runs/latest")) != new_run_name(Path("runs/latest"))


# -------------------------------------------------------------------------------------------- before the start
async def test_a_used_directory_is_refused_unless_it_is_resumed_or_replaced(tmp_path: Path) -> None:
    assert problems(save=tmp_path) == []
    await save("old", 20, 40, save=tmp_path)
    [refusal] = problems(save=tmp_path)
    assert refusal.startswith(f"--save {tmp_path} holds iter_0000040 of the run old: resume it with --load {tmp_path}")
    assert "--save-overwrite" in refusal
    assert problems(save=tmp_path, overwrite=True) == []
    assert problems(save=tmp_path, load=tmp_path) == []
    assert problems(save=tmp_path, load=tmp_path / "iter_0000040") == []
    assert problems(save=tmp_path / "new", load=tmp_path / "iter_0000020") == []
    [refusal] = problems(save=tmp_path, load=tmp_path / "iter_0000020")
    assert "holds iter_0000040 of the run old, which came after it" in refusal


async def test_a_directory_of_another_run_than_the_resumed_one_is_refused(tmp_path: Path) -> None:
    await save("old", 20, save=tmp_path / "old")
    await save("new", 10, save=tmp_path / "new")
    [refusal] = problems(save=tmp_path / "new", load=tmp_path / "old")
    assert "holds iter_0000010 of the run new, which is not that run, and --load takes" in refusal


async def test_a_truncated_or_missing_file_is_found_before_the_start(tmp_path: Path) -> None:
    await save("mine", 10, 20, save=tmp_path)
    newest = tmp_path / "iter_0000020"
    assert problems(load=tmp_path) == []
    (newest / "trainer" / "state").write_bytes(b"x" * 60)
    (newest / "position.json").touch()
    (newest / "state").unlink()
    [problem] = problems(load=tmp_path)
    assert problem == (
        f"--load {newest}: state is missing; trainer/state has 60 bytes, expected 100; "
        f"the one before it is --load {tmp_path / 'iter_0000010'}"
    )
    with pytest.raises(CheckpointError, match="has 60 bytes, expected 100"):
        await run_checkpoints("mine", load=tmp_path).load()
    (newest / "manifest.json").unlink()
    assert "expected a manifest.json, found none" in problems(load=tmp_path)[0]


async def test_requests_to_readmit_prompts_are_read_before_the_start(tmp_path: Path) -> None:
    await save("mine", 10, save=tmp_path)
    request_readmission(tmp_path, ["p1"])
    assert problems(load=tmp_path) == []
    (tmp_path / "readmit.json").write_text('["p1"]')
    [problem] = problems(load=tmp_path)
    assert "readmit.json: expected request ids with lists of prompt ids" in problem


async def test_another_models_checkpoint_is_found_before_the_start(tmp_path: Path) -> None:
    await save("mine", 10, save=tmp_path)
    [problem] = problems({**MODEL, "hidden_size": 128, "num_hidden_layers": 4}, load=tmp_path)
    assert "another model than --hf-checkpoint: expected what was saved, hidden_size 64, not 128, " in problem
    assert "num_hidden_layers 2, not 4" in problem
    assert problems({"model_type": "qwen3", "head_dim": 16}, load=tmp_path) == []  # what a config leaves out is unknown


async def test_a_disk_without_room_for_one_checkpoint_is_found_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_directory = tmp_path / "absent" / "save"
    assert problems(save=save_directory, least_bytes=3 << 30) == []
    await save("mine", 10, save=tmp_path / "mine")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100 << 10, total=10 << 30))
    [problem] = problems(save=save_directory, least_bytes=3 << 30)
    assert problem.startswith(
        f"--save {save_directory}: a checkpoint takes 3.0 GiB or more, and the disk of {tmp_path} "
    )
    assert "has 0.1 MiB of 10.0 GiB free" in problem
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100, total=10 << 30))
    [problem] = problems(save=save_directory, load=tmp_path / "mine")  # which has more than 100 bytes
    assert "a checkpoint takes" in problem


def test_a_models_fingerprint_is_what_shapes_its_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "rope_theta": 1e4, "q_lora_rank": None}))
    found = dict(fingerprint(ModelArguments(hf_checkpoint=tmp_path)))
    assert found.pop("function")["rope_theta"] == 1e4
    assert found == MODEL | {"lora_rank": 0}


async def test_a_checkpoint_of_adapters_is_that_of_their_flags_and_of_one_model(tmp_path: Path) -> None:
    """It holds no weights but theirs: those of another model of the same shape would make another policy of it."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100_000))
    adapted = ModelArguments(hf_checkpoint=tmp_path, lora_rank=4, target_modules=("q_proj,k_proj,v_proj", "o_proj"))
    saved = fingerprint(adapted)
    assert least_bytes(adapted) == 0 < least_bytes(ModelArguments(hf_checkpoint=tmp_path))

    await save("mine", 10, save=tmp_path / "saved")
    write_manifest(tmp_path / "saved" / "iter_0000010", RunIdentity(run="mine", model=saved, ranks={}), 10, {})

    def refusal(**changes: object) -> str:
        return "; ".join(problems(fingerprint(dataclasses.replace(adapted, **changes)), load=tmp_path / "saved"))

    assert refusal() == refusal(target_modules=("linear_proj", "linear_qkv")) == ""  # the same layers
    assert "lora_rank 4, not 8" in refusal(lora_rank=8)
    assert "lora_rank 4, not 0" in refusal(lora_rank=0)
    assert "target_modules linear_qkv,linear_proj, not linear_fc2" in refusal(target_modules=("down_proj",))
    weights.write_bytes(bytes(50_000) + b"1" + bytes(49_999))
    assert f"weights {saved['weights']}, not " in refusal()


# -------------------------------------------------------------------------------------------- replaced and kept
async def test_overwriting_replaces_another_run_once_the_first_checkpoint_is_whole(tmp_path: Path) -> None:
    await save("old", 10, 20, 40, save=tmp_path)
    checkpoints = run_checkpoints("new", save=tmp_path, save_overwrite=True)
    await checkpoints.save(Position(step=20))
    assert steps(tmp_path) == [10, 20, 40]  # what is there stays until there is something better
    await checkpoints.finish()
    assert names(tmp_path) == ["iter_0000020"]
    assert find_checkpoint(tmp_path).run == "new"


async def test_going_back_in_place_replaces_only_what_came_after(tmp_path: Path) -> None:
    await save("mine", 10, 20, 40, save=tmp_path)
    await save("mine again", 30, save=tmp_path, load=tmp_path / "iter_0000020", save_overwrite=True)
    assert steps(tmp_path) == [10, 20, 30]
    assert find_checkpoint(tmp_path).step == 30


async def test_two_runs_that_save_into_one_directory_are_told_so(tmp_path: Path) -> None:
    first, second = run_checkpoints("first", save=tmp_path), run_checkpoints("second", save=tmp_path)
    await second.save(Position(step=10))
    await second.finish()
    await first.save(Position(step=5))
    with pytest.raises(CheckpointError, match=r"iter_0000010 belongs to run second: two runs save there"):
        await first.finish()


async def test_only_the_newest_and_every_nth_are_kept(tmp_path: Path) -> None:
    await save("mine", 10, 20, 30, 40, 50, save=tmp_path, save_keep_last=2, save_retain_interval=20)
    assert names(tmp_path) == ["iter_0000020", "iter_0000040", "iter_0000050"]


@given(
    st.sets(st.integers(0, 200)), st.one_of(st.none(), st.integers(1, 9)), st.one_of(st.none(), st.integers(1, 9))
)  # fmt: skip
def test_the_newest_and_retained_checkpoints_are_never_expendable(
    all_steps: set[int], last: int | None, interval: int | None
) -> None:
    gone = expendable(all_steps, keep_last=last, retain_interval=interval)
    kept = sorted(all_steps - set(gone))
    assert kept[-1:] == sorted(all_steps)[-1:]
    if last is None and interval is None:
        assert gone == []
    else:
        newest = sorted(all_steps)[-(last or 1) :]
        assert kept == [s for s in sorted(all_steps) if s in newest or (interval and s % interval == 0)]


async def test_the_next_save_removes_half_written_and_half_removed_checkpoints(tmp_path: Path) -> None:
    await save("mine", 10, save=tmp_path)
    for leftover in ("iter_0000020.partial", "iter_0000005.old"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "state").touch()
    (tmp_path / "notes.partial").touch()
    await save("mine", 30, save=tmp_path, load=tmp_path)
    assert names(tmp_path) == ["iter_0000010", "iter_0000030", "notes.partial"]


async def test_a_checkpoint_that_somebody_reads_on_a_network_disk_is_removed_by_a_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a removed file that is open under another name, so that its directory is not empty."""
    remove = shutil.rmtree

    def held_open(path: Path, ignore_errors: bool = False) -> None:
        if path.suffix != ".old":
            remove(path, ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", held_open)
        await save("mine", 10, 20, 30, save=tmp_path, save_keep_last=1)
    assert names(tmp_path) == ["iter_0000010.old", "iter_0000020.old", "iter_0000030"]
    await save("mine", 40, save=tmp_path, load=tmp_path, save_keep_last=1)
    assert names(tmp_path) == ["iter_0000040"]


# ------------------------------------------------------------------------------------ saves while training goes on
@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that stopwatches show; it passes as the test says."""
    time = [0.0]
    monkeypatch.setattr(clock, "now", lambda: time[0])
    return time


class Disk(Side):
    """A trainer whose writes take as long as they are told to, and which trains on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.state = 0
        self.may_write = asyncio.Event()

    async def stage_save(self, directory: Path) -> None:
        self.staged, self.copy = directory, self.state

    async def write_save(self) -> dict[str, str]:
        await self.may_write.wait()
        await asyncio.to_thread(self.staged.mkdir)
        await asyncio.to_thread((self.staged / "state").write_text, str(self.copy))
        return {}


def saving_in_background(save: Path) -> tuple[Disk, RunCheckpoints]:
    disk, rollout = Disk(), Side()
    identity = RunIdentity(run="mine", model=MODEL, ranks=RANKS)
    arguments = CheckpointArguments(save=save, async_save=True)
    return disk, RunCheckpoints(disk, rollout, arguments, identity)  # type: ignore[arg-type]


async def test_a_checkpoint_becomes_the_newest_when_it_is_whole_and_holds_the_state_of_its_step(
    tmp_path: Path, seconds: list[float]
) -> None:
    disk, checkpoints = saving_in_background(tmp_path)
    disk.state = 10
    await checkpoints.save(Position(step=10))
    finishing = asyncio.ensure_future(checkpoints.finish())
    disk.state = 11  # trained on
    await asyncio.sleep(0.05)
    assert steps(tmp_path) == []
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        find_checkpoint(tmp_path)
    seconds[0] += 7
    disk.may_write.set()
    metrics = await finishing
    assert problems(load=tmp_path) == []  # its manifest and all files
    newest = find_checkpoint(tmp_path)
    assert (newest.step, (newest.directory / "trainer" / "state").read_text()) == (10, "10")
    assert metrics == {"checkpoint/blocked_seconds": 0, "checkpoint/write_seconds": 7}
    assert await checkpoints.finish() == {}


async def test_a_save_waits_for_the_one_before_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: list[float]
) -> None:
    disk, checkpoints = saving_in_background(tmp_path)
    await checkpoints.save(Position(step=10))
    first = asyncio.ensure_future(checkpoints.finish())
    assert "waits" not in capsys.readouterr().out
    disk.state = 20
    second = asyncio.ensure_future(checkpoints.save(Position(step=20)))
    await asyncio.sleep(0.05)
    assert not second.done()
    assert disk.copy == 0  # what is being written stays as it is
    assert "a checkpoint waits until the previous one is complete" in capsys.readouterr().out
    seconds[0] += 7
    disk.may_write.set()
    await second
    assert await first == {"checkpoint/blocked_seconds": 0, "checkpoint/write_seconds": 7}
    metrics = await checkpoints.finish()
    assert metrics == {
        "checkpoint/previous_seconds": 7, "checkpoint/blocked_seconds": 7, "checkpoint/write_seconds": 0
    }  # fmt: skip
    states = [(tmp_path / f"iter_{step:07d}" / "trainer" / "state").read_text() for step in (10, 20)]
    assert (steps(tmp_path), states) == ([10, 20], ["0", "20"])


async def test_without_async_save_the_trainer_waits_until_its_part_is_written(tmp_path: Path) -> None:
    checkpoints = run_checkpoints("mine", Side(), save=tmp_path, async_save=False)
    await checkpoints.save(Position(step=10))
    assert (tmp_path / "iter_0000010.partial" / "trainer" / "state").exists()
    await checkpoints.finish()
    assert problems(load=tmp_path) == []


# ------------------------------------------------------------------------------------------------------- errors
async def save_whole(checkpoints: RunCheckpoints) -> None:
    await checkpoints.save(Position(step=7))
    await checkpoints.finish()


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), CheckpointError("No space left on device")]
)
async def test_a_full_disk_is_named_with_flag_and_directory(tmp_path: Path, error: Exception, async_save: bool) -> None:
    # covers: C10
    side = Side()
    checkpoints = run_checkpoints("mine", side, save=tmp_path / "save", async_save=async_save)
    side.fails = error
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        await save_whole(checkpoints)
    text = str(caught.value)
    assert text.startswith(f"--save {tmp_path / 'save'}: iter_0000007 was not saved: ")
    assert f"the disk of {tmp_path / 'save'} has " in text
    assert text.endswith("iB free")
    assert names(tmp_path / "save") == []  # nothing that fills it further


async def test_a_disk_that_stops_answering_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C10
    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    side = Side()
    checkpoints = run_checkpoints("mine", side, save=tmp_path / "save")
    side.fails = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr("shutil.disk_usage", stale)
    with pytest.raises(CheckpointError, match=r"iter_0000007 was not saved: .*Input/output error; .*Stale file handle"):
        await save_whole(checkpoints)


async def test_parts_that_cannot_be_restored_are_named_with_flag_and_directory(tmp_path: Path) -> None:
    await save("mine", 10, save=tmp_path)
    side = Side()
    side.fails = CheckpointError(f"cannot read {tmp_path / 'iter_0000010' / 'trainer'}: it is empty")
    with pytest.raises(CheckpointError, match=rf"--load {tmp_path}: cannot read .*: it is empty"):
        await run_checkpoints("mine", side, load=tmp_path).load()


async def test_another_layout_of_ranks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await save("mine", 10, save=tmp_path)
    await run_checkpoints("mine", load=tmp_path).load()
    assert "another layout" not in capsys.readouterr().out
    await run_checkpoints("mine", load=tmp_path, ranks={**RANKS, "EP": 2}).load()
    assert "restored" in capsys.readouterr().out
    await run_checkpoints("mine", load=tmp_path, ranks={**RANKS, "DP": 1, "TP": 2}).load()
    said = capsys.readouterr().out
    assert "checkpoint from another layout of ranks" in said
    assert "seeded again" in said


async def test_settings_that_were_changed_are_in_the_checkpoint_as_of_its_step(tmp_path: Path) -> None:
    settings = {"lr": KeptSetting(flag=1e-6, value=2e-6), "max_weight_staleness": KeptSetting(flag=2, value=None)}
    side = Side()
    checkpoints = RunCheckpoints(
        side,  # type: ignore[arg-type]
        side,  # type: ignore[arg-type]
        CheckpointArguments(save=tmp_path),
        RunIdentity(run="mine", model=MODEL, ranks=RANKS),
        settings=lambda: dict(settings),
    )
    expected = dict(settings)
    await checkpoints.save(Position(step=1, version=1))
    settings.clear()  # changed again before the checkpoint is written
    await checkpoints.finish()
    assert kept_settings(tmp_path) == expected
    assert kept_settings(None) == kept_settings(tmp_path / "elsewhere") == {}


async def test_a_checkpoint_of_an_earlier_version_has_no_settings_and_of_a_later_one_only_known_ones(
    tmp_path: Path,
) -> None:
    await save("mine", 1, save=tmp_path)
    path = tmp_path / "iter_0000001" / "position.json"
    position = json.loads(path.read_bytes())
    assert position.pop("settings") == {}
    path.write_text(json.dumps(position))
    assert kept_settings(tmp_path) == {}
    path.write_text(json.dumps(position | {"settings": {name: {"flag": 1, "value": 2} for name in ("lr", "magic")}}))
    assert kept_settings(tmp_path) == {"lr": KeptSetting(flag=1, value=2)}
    path.write_text(json.dumps(position | {"settings": {"lr": [1, 2]}}))
    assert kept_settings(tmp_path) == {}
    assert [checkpoint.run for checkpoint in list_checkpoints(tmp_path)] == ["mine"]
    path.write_text("{")
    assert kept_settings(tmp_path) == {}


def test_a_checkpoint_that_leaves_nothing_to_train_is_noted(tmp_path: Path) -> None:
    assert list(resumption_notes(tmp_path, 8)) == []  # there is none, which is refused elsewhere
    (tmp_path / "iter_0000008").mkdir()
    assert list(resumption_notes(tmp_path, 9)) == []
    for steps in (4, 8):
        (note,) = resumption_notes(tmp_path, steps)
        assert note.endswith(f"of step 8, --num-rollout {steps} is reached: nothing to train")

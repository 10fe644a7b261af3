"""A checkpoint whose files are not those that were saved is refused, and so is one whose parts are at different steps.

# covers: C9
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.checkpoints.files import find_checkpoint, list_checkpoints
from miles_async.checkpoints.manifest import RunIdentity, check_whole
from miles_async.checkpoints.run_checkpoints import RunCheckpoints
from miles_async.errors import CheckpointError
from miles_async.runtime.files.digests import write_digested
from miles_async.seams import Position
from tests.unit.checkpoints.test_checkpoints import Side

MODEL = {"model_type": "qwen3", "hidden_size": 64}


class Trainer(Side):
    """Writes weights and the step that it counts, and digests nothing else."""

    def __init__(self, step: int = 10) -> None:
        super().__init__()
        self.step = step

    async def save(self, directory: Path) -> dict[str, str]:
        return await asyncio.to_thread(self._write, directory)

    def _write(self, directory: Path) -> dict[str, str]:
        directory.mkdir()
        (directory / "weights").write_bytes(bytes(1000))
        digest = write_digested(directory / "position.json", msgspec.json.encode({"step": self.step}))
        return {"position.json": digest}

    async def digests(self, directory: Path, sizes: dict[str, int]) -> dict[str, str]:
        assert all(name.startswith("trainer/") for name in sizes)
        return await super().digests(directory, sizes)


class Rollout(Side):
    async def save(self, directory: Path) -> dict[str, str]:
        return await asyncio.to_thread(self._write, directory)

    def _write(self, directory: Path) -> dict[str, str]:
        state = msgspec.json.encode({"source": {"epoch": 1}, "pool": {"steps": 10}})
        return {
            "rollout.json": write_digested(directory / "rollout.json", state),
            "groups.msgpack": write_digested(directory / "groups.msgpack", b"groups"),
        }


def run_checkpoints(trainer: Trainer, **flags: object) -> RunCheckpoints:
    identity = RunIdentity(run="mine", model=MODEL, ranks={"DP": 1})
    return RunCheckpoints(trainer, Rollout(), CheckpointArguments(**flags), identity)  # type: ignore[arg-type]


async def save(directory: Path, trainer: Trainer | None = None) -> Path:
    """Directory of the checkpoint of step 10, version 7."""
    checkpoints = run_checkpoints(trainer or Trainer(), save=directory)
    await checkpoints.save(Position(step=10, version=7))
    await checkpoints.finish()
    return directory / "iter_0000010"


async def load(directory: Path) -> Position | None:
    trainer = Trainer()
    try:
        return await run_checkpoints(trainer, load=directory).load()
    except CheckpointError:
        assert trainer.loaded == []  # refused before anything is restored
        raise


@pytest.mark.parametrize(
    "name", ["trainer/weights", "trainer/position.json", "rollout.json", "groups.msgpack", "position.json"]
)
async def test_one_flipped_bit_is_refused_with_the_files_name(tmp_path: Path, name: str) -> None:
    checkpoint = await save(tmp_path)
    assert await load(checkpoint) == Position(step=10, version=7)
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"--load .*{name} is not as it was saved: its digest is .*, expected"):
        await load(checkpoint)


async def test_no_bit_of_the_manifest_can_flip(tmp_path: Path) -> None:
    checkpoint = await save(tmp_path)
    path = checkpoint / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                check_whole(find_checkpoint(checkpoint), MODEL)
    path.write_bytes(content)
    assert check_whole(find_checkpoint(checkpoint), MODEL).step == 10


async def test_an_edited_step_is_refused_with_both_files(tmp_path: Path) -> None:
    checkpoint = await save(tmp_path)
    path = checkpoint / "position.json"
    path.write_bytes(path.read_bytes().replace(b'"step":10', b'"step":11'))
    with pytest.raises(CheckpointError) as caught:
        await load(checkpoint)
    for other in ("manifest.json", "rollout.json", "trainer/position.json", "the directory's name, iter_0000010,"):
        assert f"position.json says step 11, and {other} says 10" in str(caught.value)


async def test_a_trainer_at_another_step_makes_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"position\.json says step 10, and trainer/position\.json says 9"):
        await save(tmp_path, Trainer(step=9))
    assert list_checkpoints(tmp_path) == []

"""Hugging Face files of an export: which rank writes which, with which bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_async.backends.megatron.checkpoints.hf_export import file_index, write_files
from miles_async.errors import CheckpointError

FILES = {"a": "one", "b": "two", "c": "one", "d": "three", "e": "two"}


def tensors(*names: str) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield name, torch.randn(3, 5, generator=torch.Generator().manual_seed(ord(name))).to(torch.bfloat16)


def test_every_file_is_written_by_one_rank_with_the_bits_of_the_export(tmp_path: Path) -> None:
    written: list[set[str]] = []
    for rank in range(2):
        before = {path.name for path in tmp_path.iterdir()}
        sizes = write_files(tensors(*"dbcea"), FILES, tmp_path, rank=rank, ranks=2)
        assert sizes == dict.fromkeys("abcde", 30)  # all ranks take all tensors
        written.append({path.name for path in tmp_path.iterdir()} - before)
    assert written == [{"one", "two"}, {"three"}]
    for file in ("one", "two", "three"):
        save_file({name: tensor for name, tensor in tensors(*"abcde") if FILES[name] == file}, tmp_path / "expected")
        assert (tmp_path / file).read_bytes() == (tmp_path / "expected").read_bytes()
    assert file_index(sizes, FILES) == {"metadata": {"total_size": 150}, "weight_map": FILES}


def test_more_ranks_than_files_leave_some_with_nothing_to_write(tmp_path: Path) -> None:
    write_files(tensors(*"abcde"), FILES, tmp_path, rank=3, ranks=8)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_which_a_tensor_is_not_exported_has_the_others(tmp_path: Path) -> None:
    sizes = write_files(tensors(*"abd"), FILES, tmp_path, rank=0, ranks=1)
    assert {path.name: set(load_file(path)) for path in tmp_path.iterdir()} == {
        "one": {"a"},
        "two": {"b"},
        "three": {"d"},
    }
    assert file_index(sizes, FILES)["weight_map"] == {"a": "one", "b": "two", "d": "three"}


def test_a_tensor_of_no_file_and_a_failing_disk_are_errors_after_all_tensors_were_taken(tmp_path: Path) -> None:
    """Other ranks would wait in the export's collectives otherwise."""
    taken: list[str] = []

    def noted(*names: str) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors(*names):
            taken.append(name)
            yield name, tensor

    with pytest.raises(CheckpointError, match="tensors that no file of --hf-checkpoint has: x"):
        write_files(noted(*"xabcde"), FILES, tmp_path, rank=0, ranks=1)
    assert "".join(taken) == "xabcde"
    taken.clear()
    with pytest.raises(Exception, match=r"No such file or directory"):
        write_files(noted(*"abcde"), FILES, tmp_path / "absent", rank=0, ranks=1)
    assert "".join(taken) == "abcde"

"""Staged weights: files that hold what was exported, do not follow the trainer, are few, and are gone at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_async.arguments.weights import DeltaEncoding
from miles_async.errors import TrainerError
from miles_async.runtime.tensor_digest import digest
from miles_async.trainer.ranks import united
from miles_async.types import StagedWeights
from miles_async.weights.staging import Staging
from miles_async.weights.staging_options import StagingOptions
from tests.benchmarks.staging import AnonymousMemory
from tests.fakes.fake_gpu import FakeGpu


def tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        ("embed", torch.randn(20, 8, generator=draw)),
        ("norm", torch.randn(8, generator=draw).to(torch.bfloat16)),
        ("transposed", torch.randn(8, 6, generator=draw).t()),
        ("scalar", torch.tensor(float(seed))),
        ("bias", torch.randn(5, generator=draw)),
    ]


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    opened = Staging(StagingOptions(parent=tmp_path / "weights", bucket_bytes=700))
    yield opened
    opened.close()


def stage(staging: Staging, version: int, named: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
    """Both parts, one after the other."""
    staging.copy(version, named)
    return staging.stage(version)


def read(staged: StagedWeights) -> dict[str, torch.Tensor]:
    files = sorted(Path(staged.directory).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_files_hold_the_exported_tensors(staging: Staging) -> None:
    staged = stage(staging, 3, iter(tensors()))
    found = read(staged)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in tensors()}
    assert [meta.name for bucket in staged.buckets.values() for meta in bucket] == [
        "embed",
        "norm",
        "bias",
        "scalar",
        "transposed",
    ]
    assert staged.total_bytes == sum(tensor.nbytes for _, tensor in tensors())
    for bucket in staged.buckets.values():
        for meta in bucket:
            tensor = found[meta.name]
            assert (meta.dtype, meta.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
            assert meta.digest == digest(tensor.reshape(-1).view(torch.uint8).numpy(), tensor.itemsize, tensor.shape)
    manifest = (Path(staged.directory) / "manifest.json").read_bytes()
    assert msgspec.json.decode(manifest, type=StagedWeights) == staged


def test_engines_of_another_user_can_read_the_files(staging: Staging) -> None:
    staged = stage(staging, 0, iter(tensors()))
    assert {path.stat().st_mode & 0o777 for path in Path(staged.directory).glob("*.safetensors")} == {0o644}


def test_a_bucket_is_its_tensors_one_after_another(staging: Staging) -> None:
    """Aligned, since wide dtypes come first: an engine takes views of one buffer."""
    staged = stage(staging, 0, tensors())
    given = dict(tensors())
    for index, bucket in staged.buckets.items():
        data, offset = staging.bucket(0, index), 0
        for meta in bucket:
            expected = given[meta.name]
            part = data[offset : offset + expected.nbytes].clone().view(expected.dtype).reshape(expected.shape)
            assert torch.equal(part, expected)
            assert offset % expected.itemsize == 0
            offset += expected.nbytes
        assert offset == len(data)


def test_the_shares_of_several_senders_are_the_whole(tmp_path: Path) -> None:
    """Each bucket has one number and one sender, and so has what changed in it."""
    model = [(f"layers.{layer}.linear.weight", torch.full((100,), float(layer))) for layer in range(5)]
    senders = [
        Staging(StagingOptions(parent=tmp_path, bucket_bytes=400, sender=sender, senders=2, delta="xor"))
        for sender in range(2)
    ]
    for version in range(2):
        model[3][1][7] += version
        staged = united([stage(sender, version, model) for sender in senders])
    assert list(staged.buckets) == [0, 1, 2, 3, 4]
    assert [meta.name for bucket in staged.buckets.values() for meta in bucket] == [name for name, _ in model]
    for index in staged.buckets:
        assert torch.equal(
            senders[index % staged.senders].bucket(1, index).clone().view(torch.float32), model[index][1]
        )
    assert staged.total_bytes == 5 * 400
    assert staged.delta is not None
    assert [index for index, size in staged.delta.bucket_bytes.items() if size] == [3]
    assert united([staged, msgspec.structs.replace(staged, delta=None)]).delta is None
    for sender in senders:
        sender.close()


def test_staged_weights_do_not_follow_the_trainer(staging: Staging) -> None:
    """Otherwise an optimizer step during publication would send half of the next version."""
    weight = torch.arange(6.0).reshape(2, 3)
    staging.copy(0, [("w", weight)])
    weight.zero_()
    staging.stage(0)
    weight.fill_(7)
    staging.copy(1, [("w", weight)])
    assert staging.bucket(0, 0).clone().view(torch.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_version_is_there_when_its_manifest_is(
    staging: Staging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while files are written; what they are written from stays as it is."""
    # covers: C8
    writing, go_on = threading.Event(), threading.Event()

    def slow(bucket: Mapping[str, torch.Tensor], path: Path) -> None:
        writing.set()
        assert go_on.wait(10)
        save_file(dict(bucket), path)

    monkeypatch.setattr("miles_async.weights.staging.save_file", slow)
    staging.copy(1, tensors())
    with ThreadPoolExecutor(1) as weights_thread:
        staged = weights_thread.submit(staging.stage, 1)
        assert writing.wait(10)
        with pytest.raises(TrainerError, match="version 1 are not staged"):
            staging.bucket(1, 0)
        with pytest.raises(TrainerError, match="version 2 cannot be copied while the version before is being staged"):
            staging.copy(2, tensors(2))
        assert not list(tmp_path.glob("**/manifest.json"))
        go_on.set()
        assert read(staged.result(10))["scalar"] == 0
    assert len(list(tmp_path.glob("**/v0000001/manifest.json"))) == 1


def test_only_the_version_that_was_copied_last_is_staged_and_once(staging: Staging) -> None:
    staging.copy(1, tensors(1))
    staging.copy(2, tensors(2))
    with pytest.raises(TrainerError, match="version 1 cannot be staged: they were not copied"):
        staging.stage(1)
    staging.copy(2, tensors(2))
    assert read(staging.stage(2))["scalar"] == 2
    with pytest.raises(TrainerError, match="not copied"):
        staging.stage(2)


def test_an_exporter_may_use_its_memory_again(staging: Staging) -> None:
    """Bridges gather every tensor into the same buffer."""
    buffer = torch.zeros(3)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for value in range(4):
            yield f"t{value}", buffer.fill_(value)

    found = read(stage(staging, 0, export()))
    assert [found[f"t{value}"].tolist() for value in range(4)] == [[float(value)] * 3 for value in range(4)]


def test_only_the_newest_versions_are_kept(staging: Staging) -> None:  # covers: P5
    directories = [Path(stage(staging, version, tensors(version)).directory) for version in (10, 11, 12)]
    assert [directory.exists() for directory in directories] == [False, True, True]
    with pytest.raises(TrainerError, match=r"version 10 are not staged, only \[11, 12\]"):
        staging.bucket(10, 0)


def test_a_pinned_version_stays_until_it_is_unpinned(staging: Staging) -> None:
    # covers: P5
    first = Path(stage(staging, 10, tensors(10)).directory)
    staging.pin(10)
    for version in (11, 12, 13):
        stage(staging, version, tensors(version))
    assert staging.bucket(10, 0).numel() > 0
    with pytest.raises(TrainerError, match=r"version 11 are not staged, only \[10, 12, 13\]"):
        staging.bucket(11, 0)
    staging.pin(10)  # a repair and an evaluation may use the same one
    staging.unpin(10)
    stage(staging, 14, tensors(14))
    assert first.exists()
    staging.unpin(10)
    stage(staging, 15, tensors(15))
    assert not first.exists()


def test_room_is_for_all_versions_that_exist_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: P5, C8
    options = StagingOptions(parent=tmp_path, bucket_bytes=700, version_bytes=1)
    staging, found = Staging(options), []

    def write(*arguments: object) -> None:
        found.append(len(list(tmp_path.glob("*/v*"))))
        save_file(*arguments)

    monkeypatch.setattr("miles_async.weights.staging.save_file", write)
    for version in range(10, 20):
        stage(staging, version, tensors(version))
        if version % 3 == 0:  # a repair brings the version to an engine until three later ones are staged
            staging.pin(version)
            staging.unpin(version - 3) if version > 12 else None
    staging.close()
    assert max(found) == options.room


def test_a_version_may_be_staged_again(staging: Staging) -> None:
    stage(staging, 1, tensors(1))
    stage(staging, 2, tensors(2))
    again = stage(staging, 1, tensors(5))
    assert read(again)["scalar"] == 5
    assert staging.bucket(2, 0).numel() > 0


def test_an_export_that_fails_leaves_no_version(staging: Staging) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors()
        raise RuntimeError("lost a peer")

    staging.copy(0, tensors())
    with pytest.raises(RuntimeError):
        staging.copy(0, failing())
    with pytest.raises(TrainerError, match="were not copied"):
        staging.stage(0)
    with pytest.raises(TrainerError, match="not staged"):
        staging.bucket(0, 0)


def test_a_full_disk_names_the_flag(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("miles_async.weights.staging.save_file", full)
    with pytest.raises(TrainerError, match=r"version 4 cannot be staged in .*No space left.*--weight-staging-dir"):
        stage(staging, 4, tensors())


@pytest.mark.parametrize("delta", [None, "xor"])
def test_host_memory_beside_the_model_is_one_copy(tmp_path: Path, delta: DeltaEncoding | None) -> None:
    """Measured, with changes that cannot be compressed; test_megatron_backend.py has the export with it."""
    bucket_bytes, tensor_bytes = 20 * 2**20, 2**20
    model = [(f"layers.{layer}.linear.weight", torch.randn(tensor_bytes // 4)) for layer in range(5 * 20)]
    total = sum(tensor.nbytes for _, tensor in model)
    staging = Staging(StagingOptions(parent=tmp_path, bucket_bytes=bucket_bytes, delta=delta))
    with AnonymousMemory() as first:
        stage(staging, 0, model)
    for _, tensor in model:
        tensor.normal_()
    with AnonymousMemory() as second:
        staged = stage(staging, 1, model)
    staging.close()
    assert (staged.delta is not None) is (delta is not None)
    # Changes are found and compressed by the tensor: 0.5 and 3.4 of them in a process that did nothing else. After
    # other tests, what their threads left in glibc's arenas is added. A bucket at once would be seen.
    beside = bucket_bytes // 2
    assert total * 0.9 < first.above <= total + beside
    assert second.above <= beside


# ------------------------------------------------------------------------------------------------ to a GPU
class DeviceMemory(torch.Tensor):
    """Memory that gets what is copied to it when its stream comes to that."""

    gpu: FakeGpu

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_:
            return super().__torch_function__(func, types, args, kwargs)
        place, tensor = (each.as_subclass(torch.Tensor) for each in args)
        assert kwargs == {"non_blocking": True}
        cls.gpu.active.queue.append(lambda: place.copy_(tensor))
        return args[0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made, empty = FakeGpu(), torch.empty
    DeviceMemory.gpu = made
    made.install(monkeypatch)

    def memory(*size: int, device: torch.device | None = None, **options: Any) -> torch.Tensor:
        return empty(*size, **options) if device is None else empty(*size, **options).as_subclass(DeviceMemory)

    monkeypatch.setattr("miles_async.weights.staging.torch.empty", memory)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    return made


def test_a_gpu_is_given_the_copy_and_not_the_files(tmp_path: Path, gpu: FakeGpu) -> None:
    shares = [Staging(StagingOptions(parent=tmp_path, bucket_bytes=60, sender=i, senders=2)) for i in range(2)]
    for staging in shares:
        staged = stage(staging, 0, tensors())
        expected = {index: staging.bucket(0, index).tolist() for index in staged.buckets}
        for file in Path(staged.directory).glob("*.safetensors"):
            file.unlink()
        device = torch.device("cuda")
        assert {index: staging.on_device(0, index, device).tolist() for index in staged.buckets} == expected
        staging.close()


def test_a_gpu_is_given_the_files_of_a_version_that_is_in_memory_no_more(staging: Staging, gpu: FakeGpu) -> None:
    """Before, and while the copy is read."""
    first = stage(staging, 0, tensors())
    expected = {index: staging.bucket(0, index).tolist() for index in first.buckets}
    gpu.training.queue.append(lambda: staging.copy(1, tensors(1)))
    device = torch.device("cuda")
    for index in first.buckets:
        assert staging.on_device(0, index, device).tolist() == expected[index]
    second = staging.stage(1)
    assert [staging.on_device(1, index, device).tolist() for index in second.buckets] != [*expected.values()]
    for index in first.buckets:
        assert staging.on_device(0, index, device).tolist() == expected[index]

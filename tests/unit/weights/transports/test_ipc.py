"""Buckets by handle: what SGLang may unpickle, and what it then finds. The device is pretended; CUDA is not tested."""

from __future__ import annotations

import ast
import base64
import io
import pickle
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from miles_async.arguments import WeightsArguments
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.choice import make_transport
from miles_async.weights.transports.ipc_rank import IpcSender, handles
from miles_async.weights.transports.spec import RankSide
from tests.fakes.fake_sides import FakeFleet, FakeTrainer, InProcess
from tests.sglang_source import module_source

WEIGHTS = {"wide": torch.arange(6.0).reshape(2, 3), "narrow": torch.arange(5).to(torch.bfloat16)}


@pytest.fixture
def device_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Handle → tensor; torch's reductions as they are for a tensor on a GPU whose index here is 3."""
    memory: dict[str, torch.Tensor] = {}

    def reduce(tensor: torch.Tensor) -> tuple[object, ...]:
        memory[handle := f"handle {len(memory)}"] = tensor
        storage = (torch.storage.UntypedStorage, tensor.dtype, 3, handle, 4096, 0, b"counter", 0, b"event", True)
        return reductions.rebuild_cuda_tensor, (type(tensor), tensor.size(), tensor.stride(), 0, *storage, False)

    class Properties:
        uuid = "uuid of GPU 3"

    monkeypatch.setattr(reductions, "reduce_tensor", reduce)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: {3: Properties}[index])
    return memory


def share(tmp_path: Path) -> tuple[IpcSender, str]:
    staging = StagingOptions(parent=tmp_path, bucket_bytes=1000)
    sender = IpcSender(RankSide(staging=staging, address="", device="cpu", timeout_seconds=1))
    sender.copy(0, WEIGHTS.items())
    sender.stage(0)
    return sender, sender.share_bucket("g", 0, 0)


def as_sglang_does(payload: str, memory: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """deserialize_own_rank and _update_weights_from_flattened_bucket, but for the device."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            assert (module, name) in allowed_by_sglang()
            if name == "rebuild_cuda_tensor":
                return self._rebuild
            return super().find_class(module, name)

        def _rebuild(self, *arguments: object) -> torch.Tensor:
            assert arguments[6] == "uuid of GPU 3"
            return memory[arguments[7]]

    bucket = Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    data = bucket["flattened_tensor"]
    return {m.name: data[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in bucket["metadata"]}


def test_an_engine_finds_the_tensors(tmp_path: Path, device_memory: dict[str, torch.Tensor]) -> None:
    sender, payload = share(tmp_path)
    found = as_sglang_does(payload, device_memory)
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], WEIGHTS[name]) and found[name].dtype == WEIGHTS[name].dtype for name in found)
    sender.close()


@cache
def allowed_by_sglang() -> set[tuple[str, str]]:
    """SafeUnpickler.ALLOWED_GLOBALS, from the source: importing it takes a server's environment."""
    tree = ast.parse(module_source("sglang.srt.utils.common"))
    [unpickler] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SafeUnpickler"]
    [allowed] = [n for n in unpickler.body if isinstance(n, ast.Assign) and n.targets[0].id == "ALLOWED_GLOBALS"]  # type: ignore[attr-defined]
    return ast.literal_eval(allowed.value)


def test_a_tensor_of_this_process_goes_the_usual_way() -> None:
    from miles_async.types import TensorMeta

    data = torch.arange(4, dtype=torch.uint8)
    found = pickle.loads(base64.b64decode(handles(data, [TensorMeta("w", "uint8", (4,))])))
    assert torch.equal(found["flattened_tensor"], data)


async def test_buckets_are_shared_one_at_a_time_and_released() -> None:
    class Sharer:
        def share_bucket(self, name: str, version: int, index: int) -> str:
            fleet.events.append(f"share {name} {version}/{index}")
            return f"bucket {index}"

        def release(self, name: str) -> None:
            fleet.events.append(f"release {name}")

    class Trainer(FakeTrainer):
        def sender(self, index: int, *, repair: bool = False) -> InProcess:
            return InProcess(Sharer())

    fleet = FakeFleet([], joining=("engine-0", "engine-1"))
    trainer = Trainer(fleet.events)
    arguments = WeightsArguments(weight_transport="ipc")
    transport = make_transport(arguments, trainer, fleet, "cuda")
    staged = await trainer.stage_weights(4)
    fleet.faults["open bucket 1"] = {"engine-1"}
    errors = await transport.deliver(staged, (await fleet.members()).joining)
    assert [str(engine) for engine, error in errors.items() if error] == ["engine-1"]
    assert fleet.events[1:] == [
        "begin", "share weights 4/0", "open bucket 0", "share weights 4/1", "open bucket 1",
        "release weights", "end",
    ]  # fmt: skip

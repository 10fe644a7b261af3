"""Seconds of the parts of a step: on a GPU those of its stream, and nobody waits for the device before they are asked
for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from miles_async.backends.megatron.laps import Laps
from tests.fakes.fake_gpu import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    return gpu


def model(finalize: Callable[..., None]) -> torch.nn.Module:
    """A module that Megatron reads its configuration from."""
    module = torch.nn.Linear(1, 1)
    module.config = SimpleNamespace(finalize_model_grads_func=finalize)  # type: ignore[assignment]
    return module


def finalize_of(module: torch.nn.Module) -> Callable[..., None]:
    return module.config.finalize_model_grads_func  # type: ignore[union-attr,return-value]


def test_parts_take_what_the_stream_takes(gpu: FakeGpu) -> None:
    laps = Laps(torch.device("cuda", 0))
    gpu.launch(7.0)  # of the step before
    laps.begin()
    for part, seconds in {"packing": 0.25, "scoring": 1.5, "optimizer": 0.125}.items():
        gpu.launch(seconds)
        laps.end(part)
    assert gpu.seconds == 0.0, "marks wait for nothing"
    gpu.launch(9.0)  # the next step's
    assert laps.seconds() == {"packing": 0.25, "scoring": 1.5, "optimizer": 0.125}
    assert gpu.seconds == 8.875, "waited for the last mark, and for nothing after it"


def test_forward_and_reduction_of_all_optimizer_steps_are_told_apart(gpu: FakeGpu) -> None:
    laps = Laps(torch.device("cuda", 0))
    calls: list[object] = []

    def finalize(*arguments: object, **options: object) -> None:
        calls.append((arguments, options))
        gpu.launch(0.5)

    module = model(finalize)
    laps.watch_reduction(module)
    for step in range(2):  # each forgets the one before
        laps.begin()
        for seconds in (2.0, 4.0):
            gpu.launch(seconds)
            finalize_of(module)([module], step, force_all_reduce=True)
            gpu.launch(0.25)
            laps.end("optimizer")
        assert laps.seconds() == {"forward and backward": 6.0, "reducing gradients": 1.0, "optimizer": 0.5}
    assert calls == [(([module], step), {"force_all_reduce": True}) for step in (0, 0, 1, 1)]


def test_on_a_cpu_no_events_are_made(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr("miles_async.backends.megatron.laps.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    laps = Laps(torch.device("cpu"))
    laps.begin()
    laps.end("packing")
    gpu.launch(9.0)
    laps.end("scoring")
    assert laps.seconds() == {"packing": 0.5, "scoring": 1.5}
    assert gpu.seconds == 0.0

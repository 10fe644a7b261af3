"""bf16 is the default where GPUs are meant, and what a flag says holds everywhere."""

from __future__ import annotations

import pytest

from miles_async.arguments.cluster import ClusterArguments, DeviceChoice
from miles_async.arguments.model import ModelArguments
from miles_async.runtime.device import with_precision


@pytest.mark.parametrize(
    ("device", "gpu_memory_gb", "for_gpus", "bf16"),
    [
        ("cuda", None, False, True),
        ("cpu", None, False, False),
        ("auto", None, False, False),  # this machine has none
        ("auto", 80.0, False, True),
        ("auto", None, True, True),
    ],
)
def test_the_default(
    device: DeviceChoice, gpu_memory_gb: float | None, for_gpus: bool, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_async.runtime.device.count_gpus", lambda: 0)
    cluster = ClusterArguments(device=device, gpu_memory_gb=gpu_memory_gb)
    assert with_precision(ModelArguments(), cluster, for_gpus=for_gpus).bf16 is bf16
    for asked in (True, False):
        assert with_precision(ModelArguments(bf16=asked), cluster, for_gpus=for_gpus).bf16 is asked

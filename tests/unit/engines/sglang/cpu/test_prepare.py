"""What a server on a CPU finds in its environment before SGLang is imported."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import pytest

from miles_async.engines.sglang import cpu


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_nccl_is_found_on_a_cpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_NCCL_SO_PATH", "libnccl.so.2")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(cpu, "multiprocessing", SimpleNamespace(set_start_method=lambda method, force: None))
    monkeypatch.setattr(cpu.stand_ins, "install", lambda: None)
    cpu.prepare([f"--device={device}"])
    library = os.environ["SGLANG_NCCL_SO_PATH"]
    if device == "cuda":
        assert library == "libnccl.so.2"
        return
    with pytest.raises(OSError, match="No such file"):
        ctypes.CDLL(library)

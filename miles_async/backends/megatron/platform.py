"""All differences between CUDA and the host in one record; the rest of the backend is one code path.

Import this before megatron: :meth:`Platform.prepare` makes it importable. CPU runs do not exercise Transformer Engine
kernels, fused Adam, NCCL and communication overlap.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace

import torch

from miles_async.arguments.cluster import Device, DeviceChoice
from miles_async.backends.megatron import host
from miles_async.errors import ConfigurationError
from miles_async.runtime.cuda_environment import use_installed_compilers, use_installed_cudnn
from miles_async.types import GroupBackend

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""Variables of CUDA's libraries for bitwise reproducible results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """Device and layers."""

    device: Device
    transformer_engine: bool  # its layers and fusions, or host/spec.py's, which are correct but slower

    @classmethod
    def cpu(cls) -> Platform:
        return cls(device="cpu", transformer_engine=False)

    @classmethod
    def cuda(cls) -> Platform:
        return cls(device="cuda", transformer_engine=importlib.util.find_spec("transformer_engine") is not None)

    @classmethod
    def named(cls, device: DeviceChoice) -> Platform:
        """Choose by ``--device``: cpu, cuda or auto. Raises ConfigurationError if CUDA is asked for and absent."""
        if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
            return cls.cpu()
        if not torch.cuda.is_available():
            raise ConfigurationError("--device cuda, but torch sees no CUDA device: use --device cpu or auto")
        return cls.cuda()

    def prepare(self, local_rank: int) -> torch.device:
        """Make megatron importable and set this process's device. Call before the first import of megatron."""
        from miles_async.backends.megatron.families import bridge_fixes

        if self.device == "cpu":
            if torch.cuda.is_available():
                raise ConfigurationError(
                    "--device cpu on a machine with CUDA: megatron takes CUDA wherever it finds it; "
                    "hide it with CUDA_VISIBLE_DEVICES= or use --device cuda"
                )
            host.install(on_cpu=True)
            device = torch.device("cpu")
        else:
            use_installed_cudnn(os.environ)
            use_installed_compilers(os.environ)
            host.install(on_cpu=False)
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        bridge_fixes.apply()
        return device

    def choose_kernels(self, *, deterministic: bool) -> None:
        """Choose bitwise reproducible kernels, if asked for. Before the first one runs."""
        if deterministic and self.device == "cuda":
            for name, value in DETERMINISTIC.items():
                os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(deterministic)

    @property
    def with_host_layers(self) -> Platform:
        """The same platform without Transformer Engine."""
        return replace(self, transformer_engine=False)

    @property
    def communication_backend(self) -> GroupBackend:
        return "nccl" if self.device == "cuda" else "gloo"

"""Megatron as ranks on a CPU have it: without the compiler of torch, whose import alone takes seconds."""

from __future__ import annotations

import torch

from miles_async.backends.megatron import host

host.install(on_cpu=not torch.cuda.is_available())

"""Megatron as ranks on a CPU have it: without the compiler of torch, whose import alone takes seconds."""

from __future__ import annotations

from miles_async.backends.megatron.host.cpu_compat import install

install()

"""Variables that processes with GPUs get. The driver's environment comes first (``--forward-env``).

CUDA, NCCL and Ray read each of them once, when a process starts to use them, so Ray sets them for its workers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from pathlib import Path

SHARED: Mapping[str, str] = {
    # An engine and a trainer rank that differ here fail in their first common collective (--weight-transport
    # distributed). SGLang 0.5.23 sets it to 0 unless it finds a value (entrypoints/engine.py, _set_envs_and_config);
    # slime, miles and verl give their ranks 0 for that reason (slime's ray/actor_group.py, verl's
    # trainer/constants_ppo.py).
    "NCCL_CUMEM_ENABLE": "0",
    # SGLang as above: 0 unless it finds a value. NVLink SHARP takes memory for each communicator, of which a rank has
    # dozens. slime's scripts set 1 for both sides where nvidia-smi shows NVLink: export it to have the same here.
    "NCCL_NVLS_ENABLE": "0",
}
"""For every process, on both sides."""

_FIXED = {
    # Ray shows an actor its own GPUs only, and ranks take device 0 of those. OpenRLHF's scripts and some clusters
    # switch that off for all of Ray (ray/_private/accelerators/nvidia_gpu.py): every rank of a node would take the
    # node's first GPU.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
}
"""For every process, whatever the driver's environment says."""

RANKS: Mapping[str, str] = {
    # Kernels run in the order in which megatron-core launches them, by which it overlaps communication with products
    # (core/tensor_parallel/layers.py, linear_with_grad_accumulation_and_async_allreduce); Megatron-LM refuses tensor
    # and context parallelism without it before Blackwell. SGLang sets 8 for its own processes, whatever it finds.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""For trainer ranks, beyond ``SHARED``."""

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def cuda_environment(forwarded: Mapping[str, str]) -> dict[str, str]:
    """Return what every process gets; ``forwarded``: variables of the driver that travel."""
    return {name: forwarded.get(name, default) for name, default in SHARED.items()} | _FIXED


def rank_environment(environment: Mapping[str, str], *, shares_gpu: bool) -> dict[str, str]:
    """Return the environment of a trainer rank. ``environment``: what every process gets, which comes first.

    Micro-batches differ in length, and fixed segments of so many sizes fragment memory that NCCL, outside of PyTorch's
    cache, then lacks; some scripts of slime and miles set expandable segments, too. Not where engines share the GPU
    (``shares_gpu``): the memory saver cannot release them.
    """
    chosen = shares_gpu or any(name in environment for name in _ALLOCATOR)
    return {**RANKS, **({} if chosen else _EXPANDABLE), **environment}


def use_installed_cudnn(environment: MutableMapping[str, str]) -> None:
    """Have Transformer Engine load the package's cuDNN, as torch does, before a system's (its ``_load_cudnn`` takes
    these variables first). Two versions in one process call each other's functions.
    """
    if "CUDNN_HOME" in environment or "CUDNN_PATH" in environment:
        return
    if (library := _installed("nvidia.cudnn", "lib")) is not None:  # else torch has another
        environment["CUDNN_PATH"] = str(library.parent)


def use_installed_compilers(environment: MutableMapping[str, str]) -> None:
    """Have kernels that are compiled at run time find ninja of this environment, whose folder need not be on PATH, and
    the CUDA compiler of the packages (scripts/setup_env.py makes a toolkit of them), which has torch's version,
    before a system's. CUDA_HOME and CUDA_PATH come first.
    """
    path, programs = environment.get("PATH", os.defpath).split(os.pathsep), str(Path(sys.executable).parent)
    if programs not in path:
        environment["PATH"] = os.pathsep.join([*path, programs])
    if "CUDA_HOME" in environment or "CUDA_PATH" in environment:
        return
    if (library := _installed("nvidia", "cu*/lib64/libcudart.so")) is not None:
        environment["CUDA_HOME"] = str(library.parents[1])


def _installed(package: str, pattern: str) -> Path | None:
    """A path within a package of NVIDIA's, which is not imported; None if it is absent."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # no package of NVIDIA is there
        return None
    places = [] if found is None else found.submodule_search_locations or ()
    return next((path for place in places for path in sorted(Path(place).glob(pattern))), None)


def nccl_problems(sglang_flags: Collection[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield flags with which SGLang 0.5.23 overrides NCCL's variables, where trainer ranks would keep others."""
    overridden = {
        "enable-symm-mem": ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"),
        "enable-nccl-nvls": ("NCCL_NVLS_ENABLE",),
    }
    for flag, names in overridden.items():
        missing = [name for name in names if environment.get(name) != "1"]
        if f"--{flag}" in sglang_flags and missing:
            yield (
                f"--sglang-{flag}, or {flag} in --server-groups: engines then run with {'=1 '.join(names)}=1, and "
                f"trainer ranks that send them weights have to agree: export {'=1 '.join(missing)}=1, or use "
                "--weight-transport disk or object_store"
            )


def memory_saver_problems(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield settings of PyTorch's allocator that torch_memory_saver, by which engines release memory, cannot work with.

    It refuses the first variable by itself (``_sanity_checks`` in its entrypoint.py), which ends the engine.
    """
    for name in _ALLOCATOR:
        setting = environment.get(name, "")
        if "expandable_segments:true" in setting.lower().replace(" ", ""):
            yield (
                f"--colocate with {name}={setting}: engines release their memory by SGLang's memory saver, which knows "
                f"no expandable segments; unset {name}"
            )

"""Stand-ins for what only a GPU machine has: the driver's library, and the compiled part of Transformer Engine."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest.mock import MagicMock

CUDA_HEADERS = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "include")
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
ERROR_TEXT = ("cuGetErrorName", "cuGetErrorString")


def write_driver(folder: Path) -> None:
    """Compile a ``libcuda.so.1`` with all of the driver's functions, each of which answers that there is no device.

    Kernels of SGLang, FlashInfer and others are linked with it, and cannot be imported without.
    """
    command = ["gcc", "-E", "-P", "-include", "cuda.h", "-I", str(CUDA_HEADERS), "-x", "c", "/dev/null"]
    header = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    functions = sorted(set(re.findall(r"\bCUresult\s+(cu\w+)\s*\(", header)))
    source = "".join(f"int {name}() {{ return {NO_DEVICE}; }}\n" for name in functions if name not in ERROR_TEXT)
    source += "".join(
        f'int {name}(int code, const char **text) {{ *text = "no GPU"; return 0; }}\n' for name in ERROR_TEXT
    )
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=source, check=True, text=True)


def stand_in_for_transformer_engine() -> bool:
    """Let the Python part of Transformer Engine be imported without its extension for torch, whose build takes 20
    minutes of a core. Returns False if the extension is installed.
    """
    from transformer_engine import common

    try:
        common._get_shared_object_file("torch")
        return False
    except FileNotFoundError:
        extension = MagicMock(name="transformer_engine_torch")
        versions = {"get_cudnn_version": 92_400, "get_cublasLt_version": 130_100, "get_num_cublas_streams": 4}
        for name, number in versions.items():  # compared when layers are made
            setattr(extension, name, functools.partial(int, number))
        common.load_framework_extension = lambda framework: sys.modules.update(transformer_engine_torch=extension)
        return True

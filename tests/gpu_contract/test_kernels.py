"""Kernels that SGLang compiles when it runs are compiled by NVIDIA's packages, without a CUDA toolkit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_async.runtime.cuda_environment import use_installed_compilers
from tests.gpu_contract.conftest import LIMIT, ROOT

PROGRAM = """
import sys, tvm_ffi.cpp
print(tvm_ffi.cpp.build_inline("double", cuda_sources=sys.argv[1], functions=["twice"], build_directory=sys.argv[2]))
"""
KERNEL = """
#include <cub/block/block_reduce.cuh>
#include <cuda_bf16.h>

__global__ void kernel(const __nv_bfloat16 *in, __nv_bfloat16 *out) {
  out[threadIdx.x] = in[threadIdx.x] + in[threadIdx.x];
}

void twice(tvm::ffi::TensorView in, tvm::ffi::TensorView out) {
  kernel<<<1, 256>>>(static_cast<const __nv_bfloat16 *>(in.data_ptr()), static_cast<__nv_bfloat16 *>(out.data_ptr()));
}
"""

pytestmark = pytest.mark.timeout(1300)


def test_a_kernel_is_compiled_and_linked(
    environment: Callable[[bool], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from setup_env import complete_toolkit

    complete_toolkit(Path(sys.prefix))
    variables = environment(False) | {"PATH": "/usr/bin:/bin", "TVM_FFI_CUDA_ARCH_LIST": "9.0a"}
    for name in ("CUDA_HOME", "CUDA_PATH"):
        variables.pop(name, None)
    use_installed_compilers(variables)
    assert Path(variables["CUDA_HOME"]).is_relative_to(sys.prefix)
    command = [sys.executable, "-c", PROGRAM, KERNEL, str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert Path(done.stdout.strip()).is_file()

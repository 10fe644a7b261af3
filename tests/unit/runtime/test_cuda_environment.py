"""What processes with GPUs find in their environment: the same on both sides, and what the driver says first."""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from miles_async.arguments import Arguments, EnginesArguments
from miles_async.arguments.cluster import ClusterArguments
from miles_async.runs.checks import device_problems
from miles_async.runtime import cuda_environment, device
from miles_async.runtime.cuda_environment import (
    SHARED,
    memory_saver_problems,
    nccl_problems,
    use_installed_compilers,
    use_installed_cudnn,
)
from miles_async.runtime.environment import worker_environment
from miles_async.trainer.placement import RankResources

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SHARED, NOSET, "CUDA_DEVICE_MAX_CONNECTIONS", *ALLOCATOR):
        monkeypatch.delenv(name, raising=False)


def workers(*, cpu: bool = False) -> dict[str, str]:
    return worker_environment(ClusterArguments().forward_env, cpu=cpu)


def test_engines_and_ranks_have_the_same_nccl_unless_the_driver_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: workers()[name] for name in SHARED} == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert workers()["NCCL_NVLS_ENABLE"] == "1"
    assert "NCCL_CUMEM_ENABLE" not in workers(cpu=True)


def test_ray_shows_every_actor_its_own_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOSET, "1")  # as some clusters have it for all of Ray
    assert workers()[NOSET] == "0"
    from ray._common.utils import env_bool

    monkeypatch.setenv(NOSET, workers()[NOSET])
    assert env_bool(NOSET, True) is False, "Ray takes the value for no"


def test_only_ranks_order_their_kernels_by_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in workers()
    assert RankResources.for_device("cuda", workers()).env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in RankResources.for_device("cpu", workers(cpu=True)).env
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert RankResources.for_device("cuda", workers()).env["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        ((), {}, []),
        (("--enable-symm-mem",), {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}, []),
        (("--enable-symm-mem",), {"NCCL_CUMEM_ENABLE": "1"}, ["export NCCL_NVLS_ENABLE=1,"]),
        (("--enable-nccl-nvls",), {}, ["--sglang-enable-nccl-nvls", "export NCCL_NVLS_ENABLE=1,"]),
    ],
)
def test_what_sglang_overrides_must_be_exported(
    flags: tuple[str, ...], environment: dict[str, str], named: list[str]
) -> None:
    problems = list(nccl_problems(flags, environment))
    assert len(problems) == bool(named)
    assert all(word in problems[0] for word in named)


def test_ranks_with_a_gpu_of_their_own_have_memory_that_does_not_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*, shares_gpu: bool = False) -> list[str | None]:
        environment = RankResources.for_device("cuda", workers(), shares_gpu=shares_gpu).env
        return [environment.get(name) for name in ALLOCATOR]

    assert chosen() == [None, "expandable_segments:True"]
    assert chosen(shares_gpu=True) == [None, None], "--colocate: the memory saver cannot release such memory"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert chosen() == ["max_split_size_mb:512", None], "the user's choice, under its older name"


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where NVIDIA's packages are installed."""

    def find_spec(name: str) -> ModuleSpec | None:
        folder = tmp_path.joinpath(*name.split("."))
        if not folder.is_dir():
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    monkeypatch.setattr(cuda_environment.importlib.util, "find_spec", find_spec)
    return tmp_path / "nvidia"


def test_transformer_engine_takes_the_cudnn_that_torch_loads(packages: Path) -> None:
    environment: dict[str, str] = {}
    use_installed_cudnn(environment)
    assert environment == {}, "torch has another, which the linker finds"
    (packages / "cudnn/lib").mkdir(parents=True)
    environment = {"PATH": "/bin"}
    use_installed_cudnn(environment)
    assert environment == {"PATH": "/bin", "CUDNN_PATH": str(packages / "cudnn")}
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        environment = {name: "/mine"}
        use_installed_cudnn(environment)
        assert environment == {name: "/mine"}


def test_kernels_are_compiled_by_the_packages_unless_a_toolkit_is_named(packages: Path) -> None:
    path = f"/bin:{Path(sys.executable).parent}"  # where ninja is
    (packages / "cu13/lib").mkdir(parents=True)
    environment = {"PATH": "/bin"}
    use_installed_compilers(environment)
    assert environment == {"PATH": path}, "the folder of packages is no toolkit yet"
    (packages / "cu13/lib64").symlink_to("lib")
    (packages / "cu13/lib64/libcudart.so").touch()
    for _ in range(2):  # in spawned processes again
        use_installed_compilers(environment)
        assert environment == {"PATH": path, "CUDA_HOME": str(packages / "cu13")}
    for name in ("CUDA_HOME", "CUDA_PATH"):
        environment = {"PATH": path, name: "/mine"}
        use_installed_compilers(environment)
        assert environment == {"PATH": path, name: "/mine"}


@pytest.mark.parametrize("name", ALLOCATOR)
def test_an_allocator_that_cannot_release_memory_is_refused(name: str) -> None:
    [problem] = memory_saver_problems({name: "max_split_size_mb:512, expandable_segments: True"})
    assert problem.startswith(f"--colocate with {name}=max_split_size_mb:512, expandable_segments: True: ")
    assert problem.endswith(f"unset {name}")
    assert not list(memory_saver_problems({name: "expandable_segments:False"}))
    assert not list(memory_saver_problems({}))


def test_a_run_on_gpus_is_checked_with_the_environment_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "count_gpus", lambda: 8)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    engines = EnginesArguments(sglang_extra=("--enable-symm-mem",))
    found = list(device_problems(Arguments(cluster=ClusterArguments(colocate=True), engines=engines)))
    assert any(problem.startswith("--colocate with PYTORCH_ALLOC_CONF") for problem in found)
    assert any(problem.startswith("--sglang-enable-symm-mem") for problem in found)
    assert not any("PYTORCH_ALLOC_CONF" in problem for problem in device_problems(Arguments()))


@pytest.mark.parametrize(
    ("shared", "group", "found"),
    [
        ((), "sglang = { enable-symm-mem = true }", True),
        (("--enable-symm-mem",), "sglang = { enable-symm-mem = false }", False),
        ((), 'role = "frozen"\nsglang = { enable-symm-mem = true }', False),
    ],
)
def test_flags_of_a_group_override_nccl_too(
    shared: tuple[str, ...], group: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "choose_device", lambda _: "cuda")
    monkeypatch.setattr(device, "count_gpus", lambda: 8)
    (tmp_path / "fleet.toml").write_text(f"[groups.big]\n{group}\n")
    engines = EnginesArguments(server_groups=tmp_path / "fleet.toml", sglang_extra=shared)
    problems = device_problems(Arguments(engines=engines))
    assert found == any("enable-symm-mem in --server-groups" in problem for problem in problems)


def test_sglang_still_sets_what_the_values_were_chosen_by() -> None:
    import importlib.util

    spec = importlib.util.find_spec("sglang")
    text = (Path(spec.origin).parent / "srt/entrypoints/engine.py").read_text()
    for name in SHARED:
        assert re.search(rf'"{name}" not in os.environ\s*\n?\s*or cfg.enable', text), f"SGLang decides {name} otherwise"
    assert 'os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"' in text

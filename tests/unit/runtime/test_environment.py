"""Variables that travel to processes on other nodes: named ones only, and secrets where no log has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_async.arguments.cluster import FORWARDED, ClusterArguments
from miles_async.runtime.environment import (
    apply_secrets,
    hidden_modules,
    is_secret,
    secret_environment,
    worker_environment,
)
from miles_async.runtime.network.keys import KEY_VARIABLES, Secret
from miles_async.runtime.network.proxies import without_proxies_for

DEFAULT = ClusterArguments().forward_env


def test_named_variables_reach_the_workers_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: A8
    for name in ("NCCL_DEBUG", "MY_SETTING", "OTHER"):
        monkeypatch.setenv(name, "1")
    environment = worker_environment(("NCCL_*", "MY_SETTING"), cpu=False)
    assert environment["NCCL_DEBUG"] == environment["MY_SETTING"] == "1"
    assert "OTHER" not in environment
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == os.getcwd()  # where hooks are looked up


def test_files_that_hide_pythons_modules_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    for package in ("json", "test", "logging"):
        (elsewhere / package).mkdir(parents=True)
    hiding = [tmp_path / "random.py", elsewhere / "json" / "__init__.py"]
    for file in (*hiding, tmp_path / "sys.py", tmp_path / "rewards.py", elsewhere / "test" / "__init__.py"):
        file.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, elsewhere, tmp_path / "absent"))))
    assert [problem.partition(": ")[0] for problem in hidden_modules()] == list(map(str, hiding))
    assert "in the place of Python's random; rename it" in next(hidden_modules())


TRAVELS = {
    "NCCL_SOCKET_IFNAME": "eth0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "900",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "SGLANG_ENABLE_SPEC_V2": "1",
    "NVSHMEM_HCA_LIST": "mlx5_0",
    "TRITON_CACHE_DIR": "/local/triton",
    "HF_HOME": "/shared/hf",
    "HF_ENDPOINT": "https://mirror.example",
    "https_proxy": "http://proxy.example:3128",
    "NO_PROXY": "inside.example",
}
STAYS = {"CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/lib", "HOME": "/root", **dict.fromkeys(KEY_VARIABLES, "key")}
SECRETS = {
    "HF_TOKEN": "hf_x",
    "WANDB_API_KEY": "k",
    "http_proxy": "http://me:password@proxy.example:3128",
}


def test_by_default_what_all_nodes_need_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: A8, C13
    for name, text in {**TRAVELS, **STAYS, **SECRETS}.items():
        monkeypatch.setenv(name, text)
    plain, secret = worker_environment(DEFAULT, cpu=False), secret_environment(DEFAULT)
    assert TRAVELS.items() <= plain.items()
    assert not {*plain, *secret} & {*STAYS}
    assert secret.items() >= {name: Secret(text) for name, text in SECRETS.items()}.items()
    assert not {*plain} & {*secret}


def test_keys_of_the_run_never_travel_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C13
    monkeypatch.setenv("MILES_ASYNC_ADMIN_KEY", "k")
    everything = ("*",)
    assert "MILES_ASYNC_ADMIN_KEY" not in {**worker_environment(everything, cpu=True), **secret_environment(everything)}


@pytest.mark.parametrize(
    "name",
    "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID JUDGE_API_KEY DB_PASSWORD openai_api_key"
    " GOOGLE_APPLICATION_CREDENTIALS HUGGING_FACE_HUB_TOKEN".split(),
)
def test_names_of_secrets(name: str) -> None:  # covers: C13
    assert is_secret(name, "x")


def test_secrets_reach_a_process_that_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: A8
    monkeypatch.setenv("MY_TOKEN", "of the driver")
    secrets = secret_environment(("MY_*",))
    monkeypatch.delenv("MY_TOKEN")
    apply_secrets(secrets)
    assert os.environ["MY_TOKEN"] == "of the driver"


def test_every_default_has_its_reason() -> None:
    assert tuple(FORWARDED) == DEFAULT
    assert all(FORWARDED.values())


def test_hosts_of_the_run_are_reached_without_a_proxy() -> None:
    # covers: A6
    found = without_proxies_for(["node-1", "10.0.0.2"], {"no_proxy": "inside.example, node-1"})
    assert found == dict.fromkeys(("NO_PROXY", "no_proxy"), "inside.example,node-1,localhost,127.0.0.1,10.0.0.2")

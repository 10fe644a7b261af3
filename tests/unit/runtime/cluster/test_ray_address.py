"""The choice of a Ray cluster, and addresses that are refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from miles_async.arguments.cluster import ClusterArguments
from miles_async.cli import main
from miles_async.errors import ConfigurationError
from miles_async.runtime.cluster import ray_address
from miles_async.runtime.cluster.ray_address import VARIABLE, check_ray_address, find_entry, with_ray_address


@pytest.mark.parametrize(
    ("flag", "variable", "joined"),
    [
        (None, None, None),
        (None, "", None),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ("10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2:6379"),
        ("auto", None, "auto"),
        ("local", "10.0.0.1:6379", None),
        (None, "local", None),
    ],
)
def test_the_flag_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, flag: str | None, variable: str | None, joined: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    assert with_ray_address(ClusterArguments(ray_address=flag)).ray_address == joined


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_an_address_where_nothing_answers_is_refused_at_once(closed_port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"--ray-address 127.0.0.1:{closed_port} .*nothing answers there"):
        check_ray_address(f"127.0.0.1:{closed_port}")


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", ":", "head:70000", "head:x"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="expected host:port"):
        check_ray_address(address)


@pytest.fixture
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only briefly for a server that accepts connections and never answers."""
    monkeypatch.setattr(ray_address, "_PROBE_SECONDS", 1.0)


@pytest.mark.usefixtures("short_probes")
def test_an_address_that_answers_will_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        check_ray_address(f"127.0.0.1:{head.getsockname()[1]}")
    check_ray_address(None)


@pytest.fixture
def head() -> Iterator[str]:
    """The address of what answers as Ray's head does: only to those who show "right"."""

    class Head(grpc.GenericRpcHandler):
        def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
                if ("authorization", "Bearer right") not in call.invocation_metadata:
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Head()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(5)


@pytest.mark.parametrize(
    ("variable", "file", "problem"),
    [
        (None, None, "there is none in .*auth_token: copy"),
        (None, "wrong", "refuses the one in .*auth_token"),
        ("wrong", "right", "refuses the one in RAY_AUTH_TOKEN:"),
        (None, "right\n", None),
        ("right", "wrong", None),
    ],
)
def test_a_cluster_that_wants_a_token_gets_the_one_of_this_machine(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, file: str | None, problem: str
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable is not None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", variable)
    if file is not None:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(file)
    if problem is None:
        assert find_entry(head) == "token"
        return
    with pytest.raises(ConfigurationError, match=f"--ray-address {head}: the cluster wants a token, and {problem}"):
        check_ray_address(head)


@pytest.mark.usefixtures("short_probes")
def test_the_environment_is_checked_in_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed_port: int
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a", "label": "b"}) + "\n")
    model = "examples/quickstart/assets/reverse/model"
    flags = ["train", "--hf-checkpoint", model, "--prompt-data", str(tmp_path / "train.jsonl"), "--on-policy"]
    flags += ["--rm-type", "exact_match", "--run-dir", str(tmp_path / "run"), "--device", "cpu", "--dry-run"]
    flags += ["--rollout-max-response-len", "7"]
    monkeypatch.setenv(VARIABLE, f"127.0.0.1:{closed_port}")
    assert main(flags) == 2
    assert "nothing answers there" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv(VARIABLE, address)
        assert main(flags) == 0
    assert f"Ray            joins the cluster at {address}\n" in capsys.readouterr().out

"""Commands of SGLang servers and the launcher's stand-ins for absent packages."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import pytest

from miles_async.engines.kind import ServerSpec
from miles_async.engines.router import router_command, tls_flags
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.sglang.server import above_rendezvous, server_command, server_environment
from miles_async.runtime.network.addresses import LOOPBACK, Network
from miles_async.runtime.network.ports import HeldPort
from miles_async.runtime.network.tls import Tls
from tests.sglang_source import module_source

SPEC = ServerSpec(model_path="/models/m", device="cpu", dtype="float32")
GPU_SPEC = ServerSpec(model_path="m", device="cuda", dtype="bfloat16")
RENDEZVOUS = ("10.0.0.6", 2)


def command(spec: ServerSpec = SPEC, host: str = LOOPBACK, node: int = 0, **settings: object) -> list[str]:
    return server_command(msgspec.structs.replace(spec, **settings), host, 1, RENDEZVOUS, 0, node)


@pytest.mark.parametrize(
    ("settings", "flags", "otherwise"),
    [
        ({"grammars": True}, {"--grammar-backend=xgrammar"}, {"--grammar-backend=none"}),
        ({"routed_experts": True}, {"--enable-return-routed-experts"}, set()),
        ({"trust_remote_code": True}, {"--trust-remote-code"}, set()),
        # Weights come by a publication; a draft model has its own.
        ({"dummy_weights": True}, {"--load-format=dummy", "--speculative-draft-load-format=auto"}, set()),
        ({"model_overrides": {"a": None}}, {'--json-model-override-args={"a": null}'}, set()),
        # A watchdog (300 s by default) would kill a server that has seen no batch finish during a publication.
        ({"publication_seconds": 450.0}, {"--watchdog-timeout=750"}, {"--watchdog-timeout=300"}),
        ({"extra": ("--attn-dp-size", "4")}, set(), {"--sleep-on-idle"}),
        ({"extra": ("--attn-dp-size=4",)}, set(), {"--sleep-on-idle"}),
        ({"extra": ("--enable-dp-attention",)}, set(), {"--sleep-on-idle"}),
    ],
)
def test_settings_are_flags_of_the_server(settings: dict[str, object], flags: set[str], otherwise: set[str]) -> None:
    # covers: M19, C8
    found, plain = {*command(**settings)}, {*command()}
    assert flags <= found - plain
    assert otherwise <= plain - found


@pytest.mark.parametrize(
    ("overrides", "unquantized"),
    [({}, False), ({"quantization_config": {"quant_method": "fp8"}}, False), ({"quantization_config": None}, True)],
)
def test_a_server_that_gets_floats_does_not_go_by_its_files(overrides: dict[str, object], unquantized: bool) -> None:
    """SGLang (0.5.23) looks for float8 in the files of DeepSeek-V3, too. A user's flag comes later."""
    found = command(msgspec.structs.replace(SPEC, model_overrides=overrides, extra=("--quantization=fp8",)))
    assert [word for word in found if "quantization=" in word] == (
        ["--quantization=unquant"] * unquantized + ["--quantization=fp8"]
    )


@pytest.mark.parametrize("seed", [0, 2**32 + 3, 2**63 - 1])
def test_any_seed_is_one_that_the_server_can_use(seed: int) -> None:
    words = server_command(SPEC, LOOPBACK, 1, RENDEZVOUS, seed, 0)
    [given] = [word.partition("=")[2] for word in words if word.startswith("--random-seed=")]
    np.random.RandomState(int(given))  # as numpy.random.seed takes it


def test_a_server_that_lost_a_process_ends_without_a_minute_of_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C10
    defaults = module_source("sglang.srt.environ")
    wait = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
    dumps = {name: value for name, value in server_environment(SPEC).items() if name.endswith("_BEFORE_CRASH")}
    assert dumps == {wait: "false", "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false"}
    assert all(f"{name} = EnvBool(True)" in defaults for name in dumps)
    monkeypatch.setenv(wait, "true")
    assert server_environment(SPEC)[wait] == "true"


def test_sglang_still_registers_the_memory_of_experts_with_cuda_on_a_cpu() -> None:
    """The patch in ``cpu/gaps.py`` can go when it does not."""
    source = module_source("sglang.srt.mem_cache.pool_host.common")
    _, _, functions = source.partition("ALLOC_MEMORY_FUNCS = defaultdict(")
    assert "lambda: alloc_with_host_register" in functions
    assert '"cpu"' not in functions


def test_sglang_still_generates_over_pipeline_stages_while_it_is_paused() -> None:
    """``--sglang-pp-size`` need not be refused when it does not."""
    assert "_engine_paused" in module_source("sglang.srt.managers.scheduler")
    assert "_engine_paused" not in module_source("sglang.srt.managers.scheduler_pp_mixin")


def test_only_cpu_servers_get_flags_for_machines_without_a_gpu() -> None:
    cpu = command()
    assert "--attention-backend=torch_native" in cpu
    assert {"--schedule-policy=lpm", "--chunked-prefill-size=512"} <= set(cpu)  # a group's prompt is computed once
    cuda = command(GPU_SPEC, "10.0.0.7", tensor_parallel_size=4)
    assert not any("attention-backend" in argument for argument in cuda)
    assert {"--tp-size=4", "--dtype=bfloat16", "--host=10.0.0.7"} <= set(cuda)


def test_servers_that_share_their_gpus_release_memory_and_leave_the_ranks_room() -> None:
    added = command(GPU_SPEC, gpus=("0",), extra=("--mem-fraction-static=0.6",))
    assert added[-3:] == ["--enable-memory-saver", "--mem-fraction-static=0.7", "--mem-fraction-static=0.6"]
    assert added[:-3] == command(GPU_SPEC), "SGLang chooses the fraction of a GPU of its own"


def test_parts_of_an_engine_on_several_nodes_meet_at_one_address() -> None:
    parts = [command(GPU_SPEC, f"10.0.0.{node + 6}", node, tensor_parallel_size=16, nodes=2) for node in range(2)]
    for node, part in enumerate(parts):
        assert {"--tp-size=16", "--nnodes=2", f"--node-rank={node}", "--dist-init-addr=10.0.0.6:2"} <= set(part)
    alone = command()
    assert "--dist-init-addr=10.0.0.6:2" in alone
    assert not any(word.startswith("--nnodes") for word in alone)


@pytest.mark.parametrize("nodes", [1, 2])
async def test_engines_with_attention_groups_share_no_port(nodes: int, tmp_path: Path) -> None:
    """SGLang takes six ports after the one where ranks meet, and the 13th, and gives up where one is taken."""
    with HeldPort(LOOPBACK, above=range(1, 80)) as free:
        among = range(free.number, free.number + 80)
    extra, network = ("--attn-dp-size", "2"), Network(ports=among)
    spec = msgspec.structs.replace(GPU_SPEC, nodes=nodes, extra=extra, network=network, log_dir=str(tmp_path))
    engines = [ServerProcess(SGLANG, spec, index, 0) for index in range(2)]
    taken: list[int] = []
    for engine in engines:
        _, port = await engine.open_rendezvous()
        taken += [port, *range(port + 1, port + 7), port + 13, engine._hold_port(LOOPBACK)]
    assert len(taken) == len({*taken} & {*among})
    for engine in engines:
        await engine.stop()
    assert above_rendezvous(msgspec.structs.replace(spec, extra=())) == ()


def test_sglang_still_takes_those_ports() -> None:
    source = module_source("sglang.srt.server_args")
    assert "DP_ATTENTION_HANDSHAKE_PORT_DELTA = 13\n" in source
    for line in (
        "NUM_DERIVED_PORTS = 6 if not",
        "port_base = dist_init_port + 1",
        "load_collector_port = port_base + 5",
    ):
        assert line in source


@pytest.mark.parametrize(
    ("extra", "fused"),
    [
        ((), None),
        (("--dsa-topk-backend", "torch"), "false"),
        (("--dsa-topk-backend=torch",), "false"),
        (("--dsa-topk-backend", "flashinfer"), None),
    ],
)
def test_tokens_of_sparse_attention_are_chosen_by_torch_if_it_is_asked_for(
    extra: tuple[str, ...], fused: str | None
) -> None:
    """SGLang ends at the first prefill if its fused kernels are on, too."""
    spec = msgspec.structs.replace(GPU_SPEC, extra=extra)
    assert server_environment(spec).get("SGLANG_DSA_FUSE_TOPK") == fused


def test_the_users_own_arguments_come_last() -> None:
    assert command(extra=("--max-running-requests=7",))[-1] == "--max-running-requests=7"
    assert router_command(LOOPBACK, 1, 2, "random", ("--log-level=info",))[-1] == "--log-level=info"


def test_a_routers_metrics_stay_on_loopback_wherever_it_listens() -> None:  # covers: C13
    """They have neither a key nor TLS."""
    tls = tls_flags(Tls(certificate="node.pem", key="node.key", ca=None))
    found = router_command("10.0.0.7", 1, 2, "random", tls)
    assert {"--host=10.0.0.7", f"--prometheus-host={LOOPBACK}"} <= set(found)


def test_absent_packages_can_be_mentioned_and_not_used() -> None:
    code = textwrap.dedent("""
        from miles_async.engines.sglang.cpu.stand_ins import allow_mentioning, is_absent
        assert is_absent("no_such_package") and not is_absent("json")
        allow_mentioning("no_such_package", {"__version__": "1", "deep.value": 7})
        import no_such_package as p, no_such_package.language as language
        from no_such_package.deep import value
        assert p.__version__ == "1" and value == 7
        @p.jit
        def kernel(x: language.constexpr): ...
        class Derived(p.Base): ...
        try:
            p.run(1)
        except NotImplementedError as error:
            assert "no_such_package.run" in str(error)
        else:
            raise AssertionError
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)

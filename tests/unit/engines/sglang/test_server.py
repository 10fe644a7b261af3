"""Commands of SGLang servers and the launcher's stand-ins for absent packages."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from miles_async.engines.kind import ServerSpec
from miles_async.engines.router import router_command, tls_flags
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.sglang.server import above_rendezvous, server_command, server_environment
from miles_async.runtime.network.addresses import LOOPBACK, Network
from miles_async.runtime.network.ports import HeldPort
from miles_async.runtime.network.tls import Tls

SPEC = ServerSpec(model_path="/models/m", device="cpu", dtype="float32")
RENDEZVOUS = ("10.0.0.6", 2)


def test_engines_know_grammars_where_agents_may_ask_for_them() -> None:
    with_grammars = ServerSpec(model_path="m", device="cpu", dtype="float32", grammars=True)
    assert "--grammar-backend=xgrammar" in server_command(with_grammars, LOOPBACK, 1, RENDEZVOUS, 0, 0)
    assert "--grammar-backend=none" in server_command(SPEC, LOOPBACK, 1, RENDEZVOUS, 0, 0)


def test_engines_tell_experts_where_they_are_replayed() -> None:  # covers: M19
    telling = ServerSpec(model_path="m", device="cuda", dtype="bfloat16", routed_experts=True)
    flag = "--enable-return-routed-experts"
    assert flag in server_command(telling, LOOPBACK, 1, RENDEZVOUS, 0, 0)
    assert flag not in server_command(SPEC, LOOPBACK, 1, RENDEZVOUS, 0, 0)


def test_engines_run_code_of_the_tokenizer_only_if_the_run_does() -> None:
    trusting = ServerSpec(model_path="m", device="cpu", dtype="float32", trust_remote_code=True)
    assert "--trust-remote-code" in server_command(trusting, LOOPBACK, 1, RENDEZVOUS, 0, 0)
    assert "--trust-remote-code" not in server_command(SPEC, LOOPBACK, 1, RENDEZVOUS, 0, 0)


def test_a_server_that_lost_a_process_ends_without_a_minute_of_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C10
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    defaults = (Path(package.origin).parent / "srt" / "environ.py").read_text()
    wait = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
    dumps = {name: value for name, value in server_environment(SPEC).items() if name.endswith("_BEFORE_CRASH")}
    assert dumps == {wait: "false", "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false"}
    assert all(f"{name} = EnvBool(True)" in defaults for name in dumps)
    monkeypatch.setenv(wait, "true")
    assert server_environment(SPEC)[wait] == "true"


def test_sglang_still_registers_the_memory_of_experts_with_cuda_on_a_cpu() -> None:
    """The patch in ``cpu/gaps.py`` can go when it does not."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "srt" / "mem_cache" / "pool_host" / "common.py").read_text()
    _, _, functions = source.partition("ALLOC_MEMORY_FUNCS = defaultdict(")
    assert "lambda: alloc_with_host_register" in functions
    assert '"cpu"' not in functions


def test_sglang_still_generates_over_pipeline_stages_while_it_is_paused() -> None:
    """``--sglang-pp-size`` need not be refused when it does not."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    managers = Path(package.origin).parent / "srt" / "managers"
    assert "_engine_paused" in (managers / "scheduler.py").read_text()
    assert "_engine_paused" not in (managers / "scheduler_pp_mixin.py").read_text()


def test_only_cpu_servers_get_flags_for_machines_without_a_gpu() -> None:
    cpu = server_command(SPEC, LOOPBACK, 1, RENDEZVOUS, 0, 0)
    assert "--attention-backend=torch_native" in cpu
    assert {"--schedule-policy=lpm", "--chunked-prefill-size=512"} <= set(cpu)  # a group's prompt is computed once
    cuda = server_command(
        ServerSpec(model_path="m", device="cuda", dtype="bfloat16", tensor_parallel_size=4),
        "10.0.0.7",
        1,
        RENDEZVOUS,
        0,
        0,
    )
    assert not any("attention-backend" in argument for argument in cuda)
    assert {"--tp-size=4", "--dtype=bfloat16", "--host=10.0.0.7"} <= set(cuda)


def test_servers_that_share_their_gpus_release_memory_and_leave_the_ranks_room() -> None:
    own = ServerSpec(model_path="m", device="cuda", dtype="bfloat16")
    shared = msgspec.structs.replace(own, gpus=("0",), extra=("--mem-fraction-static=0.6",))
    added = [*server_command(shared, LOOPBACK, 1, RENDEZVOUS, 0, 0)]
    assert added[-3:] == ["--enable-memory-saver", "--mem-fraction-static=0.7", "--mem-fraction-static=0.6"]
    assert added[:-3] == server_command(own, LOOPBACK, 1, RENDEZVOUS, 0, 0)


def test_parts_of_an_engine_on_several_nodes_meet_at_one_address() -> None:
    spec = ServerSpec(model_path="m", device="cuda", dtype="bfloat16", tensor_parallel_size=16, nodes=2)
    parts = [server_command(spec, f"10.0.0.{node + 6}", 1, RENDEZVOUS, 0, node) for node in range(2)]
    for node, part in enumerate(parts):
        assert {"--tp-size=16", "--nnodes=2", f"--node-rank={node}", "--dist-init-addr=10.0.0.6:2"} <= set(part)
    alone = server_command(SPEC, LOOPBACK, 1, RENDEZVOUS, 0, 0)
    assert "--dist-init-addr=10.0.0.6:2" in alone
    assert not any(word.startswith("--nnodes") for word in alone)


@pytest.mark.parametrize("nodes", [1, 2])
async def test_engines_with_attention_groups_share_no_port(nodes: int, tmp_path: Path) -> None:
    """SGLang takes six ports after the one where ranks meet, and the 13th, and gives up where one is taken."""
    with HeldPort(LOOPBACK, above=range(1, 80)) as free:
        among = range(free.number, free.number + 80)
    spec = ServerSpec(
        model_path="m",
        device="cuda",
        dtype="bfloat16",
        nodes=nodes,
        extra=("--attn-dp-size", "2"),
        network=Network(ports=among),
        log_dir=str(tmp_path),
    )
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
    """Read, not imported: that takes 10 s."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    source = (Path(found.origin).parent / "srt/server_args.py").read_text()
    assert "DP_ATTENTION_HANDSHAKE_PORT_DELTA = 13\n" in source
    for line in (
        "NUM_DERIVED_PORTS = 6 if not",
        "port_base = dist_init_port + 1",
        "load_collector_port = port_base + 5",
    ):
        assert line in source


def test_engines_that_get_publications_start_with_random_weights_and_a_draft_model_with_its_own() -> None:
    # covers: C8
    dummy = ServerSpec(model_path="m", device="cpu", dtype="float32", dummy_weights=True)
    expected = {"--load-format=dummy", "--speculative-draft-load-format=auto"}
    assert expected <= set(server_command(dummy, LOOPBACK, 1, RENDEZVOUS, 0, 0))
    assert not expected & set(server_command(SPEC, LOOPBACK, 1, RENDEZVOUS, 0, 0))


def test_a_server_outlives_a_publication_that_takes_all_the_time_it_may() -> None:
    """Its watchdog (300 s by default) would kill it, having seen no batch finish meanwhile."""
    # covers: C8
    published = ServerSpec(model_path="m", device="cpu", dtype="float32", publication_seconds=450.0)
    assert "--watchdog-timeout=750" in server_command(published, LOOPBACK, 1, RENDEZVOUS, 0, 0)
    assert "--watchdog-timeout=300" in server_command(SPEC, LOOPBACK, 1, RENDEZVOUS, 0, 0)


@pytest.mark.parametrize(
    ("extra", "sleeps"),
    [((), True), (("--attn-dp-size", "4"), False), (("--attn-dp-size=4",), False), (("--enable-dp-attention",), False)],
)
def test_idle_schedulers_sleep_unless_a_request_to_all_wakes_one_of_them_only(
    extra: tuple[str, ...], sleeps: bool
) -> None:
    """With data-parallel attention the others would sleep on for a second, at every request of a publication."""
    spec = ServerSpec(model_path="m", device="cuda", dtype="bfloat16", extra=extra)
    assert ("--sleep-on-idle" in server_command(spec, LOOPBACK, 1, RENDEZVOUS, 0, 0)) == sleeps


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
    spec = ServerSpec(model_path="m", device="cuda", dtype="bfloat16", extra=extra)
    assert server_environment(spec).get("SGLANG_DSA_FUSE_TOPK") == fused


def test_the_users_own_arguments_come_last() -> None:
    spec = ServerSpec(model_path="m", device="cpu", dtype="float32", extra=("--max-running-requests=7",))
    assert server_command(spec, LOOPBACK, 1, RENDEZVOUS, 0, 0)[-1] == "--max-running-requests=7"
    assert router_command(LOOPBACK, 1, 2, "random", ("--log-level=info",))[-1] == "--log-level=info"


def test_a_routers_metrics_stay_on_loopback_wherever_it_listens() -> None:  # covers: C13
    """They have neither a key nor TLS."""
    tls = tls_flags(Tls(certificate="node.pem", key="node.key", ca=None))
    command = router_command("10.0.0.7", 1, 2, "random", tls)
    assert {"--host=10.0.0.7", f"--prometheus-host={LOOPBACK}"} <= set(command)


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


def test_engines_that_share_gpus_can_release_their_memory() -> None:
    shared = ServerSpec(model_path="m", device="cuda", dtype="bfloat16", gpus=("3", "1"))
    assert "--enable-memory-saver" in server_command(shared, LOOPBACK, 1, RENDEZVOUS, 0, 0)
    assert "--enable-memory-saver" not in server_command(SPEC, LOOPBACK, 1, RENDEZVOUS, 0, 0)


def test_engines_that_share_gpus_leave_room_for_what_ranks_keep() -> None:
    def fractions(spec: ServerSpec) -> list[str]:
        command = server_command(spec, LOOPBACK, 1, RENDEZVOUS, 0, 0)
        return [word for word in command if word.startswith("--mem-fraction-static")]

    alone = ServerSpec(model_path="m", device="cuda", dtype="bfloat16")
    shared = msgspec.structs.replace(alone, gpus=("0",))
    assert fractions(alone) == [], "SGLang chooses"
    assert fractions(shared) == ["--mem-fraction-static=0.7"]
    asked = msgspec.structs.replace(shared, extra=("--mem-fraction-static=0.5",))
    assert fractions(asked)[-1] == "--mem-fraction-static=0.5", "the user's comes last and wins"

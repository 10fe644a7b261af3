"""The flags that are read from SGLang's source are those of its parser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles_async.engines.sglang.known_flags import sglang_flags, unknown_flags
from miles_async.runtime.processes.fork_server_process import ForkServer
from tests.integration.forked_script import run_forked
from tests.integration.served_models import save_served

pytestmark = pytest.mark.integration

PROGRAM = """
import argparse, json, sys
import miles_async.engines.sglang.launcher
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from miles_async.engines.kind import ServerSpec
from miles_async.engines.sglang.api import MEMORY_TAGS
from miles_async.engines.sglang.server import server_command
spec = ServerSpec(model_path=sys.argv[1], device="cpu", dtype="float32", tensor_parallel_size=4, nodes=2)
nodes = []
for node in range(2):
    words = server_command(spec, "127.0.0.1", 30000 + node, ("127.0.0.1", 7), 0, node)[2:]
    args = prepare_server_args(words)
    nodes.append([args.nnodes, args.node_rank, args.dist_init_addr, args.tp_size])
assert set(MEMORY_TAGS) == set(GPU_MEMORY_ALL_TYPES)
for request in (ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput):
    assert request(tags=MEMORY_TAGS).tags == MEMORY_TAGS
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps({"nodes": nodes, "flags": [flag for flag in parser._option_string_actions if flag.startswith("--")]}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, sglang_imports: ForkServer) -> dict[str, Any]:
    """What a process with SGLang makes of the command of each of two nodes, and the flags that it knows."""
    folder = tmp_path_factory.mktemp("flags")
    model = save_served("qwen3-tied", folder / "model", seed=0)
    done = run_forked(sglang_imports, folder / "program.py", PROGRAM, str(model), "--device=cpu")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_sglang_takes_the_command_of_each_node_and_the_kinds_of_memory(told: dict[str, object]) -> None:
    assert told["nodes"] == [[2, node, "127.0.0.1:7", 4] for node in range(2)]
    assert "--enable-memory-saver" in sglang_flags()


def test_every_flag_of_sglangs_parser_is_known(told: dict[str, Any]) -> None:
    flags = told["flags"]
    assert len(flags) > 300
    assert not list(unknown_flags([flag for flag in flags if flag != "--help"], sglang_flags(), "--sglang-"))
    assert len(sglang_flags() - {*flags}) < 50  # fields of its arguments that it has no flag for

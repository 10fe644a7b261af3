"""The flags that are read from SGLang's source are those of its parser."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from miles_async.engines.sglang.known_flags import sglang_flags, unknown_flags
from tests.integration.served_models import save_served

pytestmark = pytest.mark.integration

CODE = """
import argparse, json
import miles_async.engines.sglang.launcher
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([flag for flag in parser._option_string_actions if flag.startswith("--")]))
"""


PARTS = """
import dataclasses, json, sys
import miles_async.engines.sglang.launcher
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from sglang.srt.server_args import prepare_server_args
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from miles_async.engines.kind import ServerSpec
from miles_async.engines.sglang.api import MEMORY_TAGS
from miles_async.engines.sglang.server import server_command
spec = ServerSpec(model_path=sys.argv[1], device="cpu", dtype="float32", tensor_parallel_size=4, nodes=2)
found = []
for node in range(2):
    words = server_command(spec, "127.0.0.1", 30000 + node, ("127.0.0.1", 7), 0, node)[2:]
    args = prepare_server_args(words)
    found.append([args.nnodes, args.node_rank, args.dist_init_addr, args.tp_size])
assert set(MEMORY_TAGS) == set(GPU_MEMORY_ALL_TYPES)
for request in (ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput):
    assert request(tags=MEMORY_TAGS).tags == MEMORY_TAGS
print(json.dumps(found))
"""


@pytest.mark.timeout(120)
def test_sglang_takes_the_command_of_each_node_and_the_kinds_of_memory(tmp_path):
    model = save_served("qwen3-tied", tmp_path / "model", seed=0)
    command = [sys.executable, "-c", PARTS, str(model), "--device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[2, node, "127.0.0.1:7", 4] for node in range(2)]
    assert "--enable-memory-saver" in sglang_flags()


@pytest.mark.timeout(120)
def test_every_flag_of_sglangs_parser_is_known():
    command = [sys.executable, "-c", CODE, "--device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    flags = json.loads(done.stdout.splitlines()[-1])
    assert len(flags) > 300
    assert not list(unknown_flags([flag for flag in flags if flag != "--help"], sglang_flags(), "--sglang-"))
    assert len(sglang_flags() - {*flags}) < 50  # fields of its arguments that it has no flag for

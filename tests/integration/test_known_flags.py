"""The flags that are read from SGLang's source are those of its parser."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from miles_async.engines.sglang.known_flags import sglang_flags, unknown_flags

pytestmark = pytest.mark.integration

CODE = """
import argparse, json
import miles_async.engines.sglang.launcher
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([flag for flag in parser._option_string_actions if flag.startswith("--")]))
"""


@pytest.mark.timeout(120)
def test_every_flag_of_sglangs_parser_is_known():
    command = [sys.executable, "-c", CODE, "--device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    flags = json.loads(done.stdout.splitlines()[-1])
    assert len(flags) > 300
    assert not list(unknown_flags([flag for flag in flags if flag != "--help"], sglang_flags(), "--sglang-"))
    assert len(sglang_flags() - {*flags}) < 50  # fields of its arguments that it has no flag for

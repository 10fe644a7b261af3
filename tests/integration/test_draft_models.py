"""Weights of a publication go to the model that is served, not to a draft model for speculation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.runtime.processes.fork_server_process import ForkServer
from tests.integration.forked_script import run_forked

pytestmark = pytest.mark.integration

PROGRAM = """
import json
import miles_async.engines.sglang.launcher
from types import SimpleNamespace as Namespace
from miles_async.engines.sglang import weight_stream
from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.plugins import load_plugins

load_plugins()

class Worker:  # and its only runner, and what updates the weights of that
    device = "cpu"
    _model_update_group = {"group": None}

    def __init__(self, role):
        self.role = role
        self.model_runner = self.weight_updater = self

    def weight_update_runners(self):
        return [(self.role, self)]

    def begin_weight_update(self):
        told.append(("begin", self.role))

    def load_weights_from_distributed(self, tensors):
        told.append(("stream", self.role))
        return True, ""

    def update_weights_from_disk(self, *arguments, **options):
        told.append(("disk", self.role))
        return False, "seen"

    def update_weights_from_tensor(self, **options):
        told.append(("tensor", self.role))
        return False, "seen"

    def deserialize_own_rank(self, tensors):
        return tensors

told = []
weight_updater.torch = Namespace(distributed=Namespace(barrier=lambda group: None))
weight_stream.received = lambda groups, device: (bucket for bucket in [[]])
manager = object.__new__(weight_updater.SchedulerWeightUpdaterManager)
manager.tp_worker, manager.draft_worker = Worker("target"), Worker("draft")
manager.metrics_collector = manager.tp_cpu_group = manager._session = None
manager.begin_weight_update(BeginWeightUpdateReqInput())
assert weight_stream._loaded(manager, ["group"]) is None
manager.update_weights_from_tensor(Namespace(serialized_named_tensors=[], load_format=None, selector="all"))
manager.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path="files"))
print(json.dumps(told))
"""


def test_a_draft_model_gets_no_publication(tmp_path: Path, sglang_imports: ForkServer) -> None:
    done = run_forked(sglang_imports, tmp_path / "program.py", PROGRAM, "--device=cpu")
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == [[step, "target"] for step in ("begin", "stream", "tensor", "disk")]

"""Batches of ``--load-debug-rollout-data`` for the trainer that the flags describe."""

from __future__ import annotations

import asyncio

import ray

from miles_async.arguments import Arguments
from miles_async.arguments.debug import file_of_step
from miles_async.arguments.model_files import read_config
from miles_async.rollout.dumps import read_dump
from miles_async.train_data.work import quadratic_work
from miles_async.types import PreparedBatch
from miles_async.wiring.decisions import make_batches


class DumpedBatches:
    """Read, converted and split as by a rollout manager: advantages are estimated again, by this run's flags."""

    def __init__(self, arguments: Arguments) -> None:
        model, template = arguments.model.hf_checkpoint, arguments.debug.load_debug_rollout_data
        assert model is not None
        assert template is not None
        self._template = template
        self._maker = make_batches(arguments, quadratic_work=quadratic_work(read_config(model)))

    async def __call__(self, step: int) -> PreparedBatch:
        """The batch of a step. Raises DataError, and ContractViolation if a sample is older than this run's bound."""
        return await asyncio.to_thread(self._prepare, step)

    def _prepare(self, step: int) -> PreparedBatch:
        dump = read_dump(file_of_step(self._template, step))
        return self._maker.make(dump.groups, dump.target_version, batch_id=step, put=ray.put)

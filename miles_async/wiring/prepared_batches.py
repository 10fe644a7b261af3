"""Batches for a trainer without a rollout side: from examples (``--loss-type sft_loss``), or from a dump of another run
(``--load-debug-rollout-data``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import ray
import structlog

from miles_async.arguments import Arguments
from miles_async.arguments.debug import file_of_step
from miles_async.arguments.model_files import read_config
from miles_async.checkpoints.files import EXAMPLES_FILE
from miles_async.errors import CheckpointError
from miles_async.prompts.conversations import Answered
from miles_async.prompts.examples import Example, ExampleSource
from miles_async.prompts.templates import ChatTemplate
from miles_async.prompts.tokenizers import load_tokenizer
from miles_async.rollout.dumps import read_dump
from miles_async.runtime.files.digests import write_digested
from miles_async.runtime.picture_processor import load_picture_processor
from miles_async.samples.recorder import sample_recorder
from miles_async.seams import Resumption
from miles_async.staleness.versions import group_of
from miles_async.types import NO_VERSION, Attempt, Branch, Group, JsonObject, PreparedBatch, Sample, TokenScores
from miles_async.wiring.decisions import make_batches, quadratic_work_of

log = structlog.get_logger(__name__)

VERSION = 0  # nothing is published, and all examples are equally new


def example_source(arguments: Arguments) -> ExampleSource:
    """The examples of a run. Raises ConfigurationError, DataError."""
    model = arguments.model
    tokenizer = load_tokenizer(model.directory, model.trust_remote_code)
    template = ChatTemplate(tokenizer, arguments.data.apply_chat_template)
    positions = read_config(model.directory).get("max_position_embeddings")
    most = arguments.micro_batch_tokens
    most = min(most, positions) if isinstance(positions, int) else most
    images = load_picture_processor(model.directory)
    source = ExampleSource(arguments.data, template, most, anyway=arguments.checkpoint.load_anyway, images=images)
    source.require_rendered(source.check)
    source.require_usable()
    return source


class SupervisedBatches:
    """Examples in the order of the prompt source, split over ranks and packed like samples; also their cursor's part
    of a checkpoint.
    """

    def __init__(self, arguments: Arguments) -> None:
        """Raises ConfigurationError, DataError."""
        self._source = example_source(arguments)
        for note in self._source.skip_notes(self._source.check):
            log.warning("examples", note=note)
        self._count = arguments.rollout.rollout_batch_size
        self._samples = sample_recorder(arguments.observability, self._source.template.decode_all, sampled=False)
        self._maker = make_batches(arguments, quadratic_work=quadratic_work_of(arguments), viewer=self._samples)
        self._taken = 0
        self._snapshot: JsonObject = {}

    async def __call__(self, step: int) -> PreparedBatch:
        """The batch of a step; steps are asked for in order. Raises DataError."""
        return await asyncio.to_thread(self._prepare, step)

    def trained(self, step: int, scores: Sequence[TokenScores]) -> None:
        """Write the samples of a step with what the trainer computed for their tokens."""
        if self._samples is not None:
            self._samples.trained(step, scores)

    async def finish(self) -> None:
        """Write samples that are queued (``--save-samples``)."""
        if self._samples is not None:
            await asyncio.to_thread(self._samples.finish)

    async def snapshot(self) -> None:
        """Keep the cursor for :meth:`save`."""
        self._snapshot = self._source.state()

    async def save(self, directory: Path) -> Mapping[str, str]:
        """Write the last snapshot; return the digest of its file. Raises OSError."""
        content = msgspec.json.encode(self._snapshot)
        return {EXAMPLES_FILE: await asyncio.to_thread(write_digested, directory / EXAMPLES_FILE, content)}

    async def load(self, directory: Path, resumption: Resumption) -> None:
        """Continue from the cursor of a checkpoint. Raises CheckpointError."""
        try:
            state = msgspec.json.decode((directory / EXAMPLES_FILE).read_bytes(), type=JsonObject)
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(
                f"--load {directory}: expected a checkpoint of --loss-type sft_loss: {error}; to continue from other "
                "training, give its --save-hf as --hf-checkpoint"
            ) from error
        if changes := self._source.restore(state):
            log.warning("resumed with other prompts than were saved, by --load-anyway", changed=list(changes))

    def _prepare(self, step: int) -> PreparedBatch:
        examples = self._source.take(self._count)
        groups = tuple(self._group(example) for example in examples)
        lengths = [len(branch.tokens) for example in examples for branch in example.branches]
        metrics = {
            "sft/epoch": float(examples[-1].epoch),
            "sft/length_mean": float(np.mean(lengths)),
            "sft/length_max": float(max(lengths)),
            "sft/skipped": float(self._source.skipped),
        }
        prepared = self._maker.make(groups, VERSION, batch_id=step, put=ray.put)
        return msgspec.structs.replace(prepared, metrics=metrics)

    def _group(self, example: Example) -> Group:
        first, *others = [_branch(branch) for branch in example.branches]
        sample = Sample(
            **msgspec.structs.asdict(first), text="", finish_reason="stop", reward=0.0, more_branches=tuple(others)
        )
        attempt = Attempt(attempt_id=self._taken, prompt=example.prompt, epoch=example.epoch)
        self._taken += 1
        return group_of(attempt, [sample])


def _branch(answered: Answered) -> Branch:
    """A branch that no engine sampled: log-probs are 0, and its version is the constant one."""
    return Branch(
        tokens=answered.tokens,
        prompt_length=int(np.argmax(answered.loss_mask)),
        loss_mask=answered.loss_mask,
        rollout_logprobs=np.zeros(len(answered.tokens), np.float32),
        weight_versions=np.where(answered.loss_mask != 0, VERSION, NO_VERSION).astype(np.int32),
        pictures=answered.pictures,
    )


class DumpedBatches:
    """Converts and splits dumped batches as a rollout manager would; advantages are estimated again, by this run's
    flags.
    """

    def __init__(self, arguments: Arguments) -> None:
        assert arguments.debug.load_debug_rollout_data is not None
        self._template = arguments.debug.load_debug_rollout_data
        self._maker = make_batches(arguments, quadratic_work=quadratic_work_of(arguments))

    async def __call__(self, step: int) -> PreparedBatch:
        """The batch of a step. Raises DataError, and ContractViolation if a sample is older than this run's bound."""
        return await asyncio.to_thread(self._prepare, step)

    def _prepare(self, step: int) -> PreparedBatch:
        dump = read_dump(file_of_step(self._template, step))
        return self._maker.make(dump.groups, dump.target_version, batch_id=step, put=ray.put)

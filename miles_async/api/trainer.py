"""Protocols of training backends: one rank, and optional abilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miles_async.types import SettingValue, TokenScores, TrainShard


class TrainBackend(Protocol):
    """One rank of a training engine, by ``--train-backend``: a name in the entry points ``miles_async.backends``.

    >>> import torch
    >>> class OneWeight:
    ...     data_parallel_rank = pipeline_stage = 0
    ...
    ...     def __init__(self, *, rank, world_size, local_rank, store, **settings):
    ...         self.weight = torch.zeros(1)
    ...
    ...     def train(self, shard):
    ...         for micro_batches in shard.optimizer_steps:
    ...             self.weight += sum(float(batch.rewards.mean()) for batch in micro_batches)
    ...         return {"weight": float(self.weight)}
    ...
    ...     def logprobs(self, sequences, temperature=None):
    ...         return [[0.0] * (len(tokens) - 1) for tokens in sequences]
    ...
    ...     def export_weights(self):
    ...         yield "weight", self.weight
    ...
    ...     def save(self, directory):
    ...         torch.save(self.weight, directory / "weight.pt")
    ...
    ...     def load(self, directory):
    ...         self.weight = torch.load(directory / "weight.pt")
    ...
    ...     save_hf = save
    >>> backend = OneWeight(rank=0, world_size=1, local_rank=0, store=None)
    >>> backend.train(shard)
    {'weight': 0.5}
    >>> backend.save(directory)
    >>> backend.load(directory)
    >>> dict(backend.export_weights())
    {'weight': tensor([0.5000])}
    """

    data_parallel_rank: int
    pipeline_stage: int | None  # on the first rank of a pipeline stage, which may send weights; None on others

    def train(self, shard: TrainShard) -> dict[str, float]:
        """Take all optimizer steps of a batch; return metrics. Collective.

        A metric ``bad_steps/REASON`` above 0 says that an optimizer step was not made, as it would have harmed the
        weights: then the run ends, or continues with the next batch (``--bad-step-action``).
        """
        ...

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float | None = None) -> list[list[float]]:
        """Log-probs of tokens[1:] of each sequence, at the rollout temperature unless given. Collective."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Any]]:
        """(HF name, torch tensor) in a fixed order, on every rank. Collective.

        A tensor on a CPU may be overwritten when the next one is asked for. Tensors on a GPU are copied during the
        export, so it must not overwrite them.
        """
        ...

    def save(self, directory: Path) -> Mapping[str, str] | None:
        """May return digests of files that it made while it wrote them (``runtime/files/digests.py``), by their path
        below ``directory``. Files without one are read again by the driver.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restore what :meth:`save` wrote, in this layout of ranks or another. Optimizer settings come from the flags,
        not from the checkpoint. Raises CheckpointError.
        """
        ...

    def save_hf(self, directory: Path) -> None: ...


@runtime_checkable
class SavesInBackground(Protocol):
    r"""A training backend whose checkpoints are written while it continues to train (``--async-save``).

    >>> class OneCopy:
    ...     weight = torch.tensor([0.5])
    ...
    ...     def stage_save(self, directory):
    ...         self.staged = directory, self.weight.clone()
    ...
    ...     def write_save(self):
    ...         directory, copy = self.staged
    ...         torch.save(copy, directory / "rank-0.pt")
    ...         return b"rank-0.pt"
    ...
    ...     def finish_save(self, parts):
    ...         (self.staged[0] / "index").write_bytes(b"\n".join(parts))
    >>> backend = OneCopy()
    >>> backend.stage_save(directory)
    >>> _ = backend.weight.add_(1.0)  # training continues
    >>> backend.finish_save([backend.write_save()])
    >>> torch.load(directory / "rank-0.pt")
    tensor([0.5000])
    """

    def stage_save(self, directory: Path) -> None:
        """Copy all that ``save(directory)`` would write. Collective. Nothing is copied before the last one is whole."""
        ...

    def write_save(self) -> bytes:
        """Write this rank's files from the copy, in a separate thread while training continues: nothing collective.
        Return what :meth:`finish_save` needs to know of them. Raises CheckpointError.
        """
        ...

    def finish_save(self, parts: Sequence[bytes]) -> Mapping[str, str] | None:
        """Make the checkpoint loadable: on rank 0, in the same thread, once all ranks have written. ``parts``: what
        each rank returned, in rank order. May return digests as :meth:`TrainBackend.save` does, of all ranks.
        Raises CheckpointError.
        """
        ...


@runtime_checkable
class ChangesSettings(Protocol):
    """A training backend whose settings change during the run (``miles-async set``).

    >>> class OneRate:
    ...     rate = 1e-6
    ...
    ...     def change(self, values):
    ...         self.rate = values.get("lr", self.rate)
    >>> backend = OneRate()
    >>> backend.change({"lr": 2e-6, "max_rollout_lead": 2})
    >>> backend.rate
    2e-06
    """

    def change(self, values: Mapping[str, SettingValue]) -> None:
        """Apply changed settings to later steps, by the flags' fields: ``lr``, ``entropy_coef``, ``kl_loss_coef`` and
        ``kl_coef``. Others are not the trainer's. Called on all ranks, between two steps.
        """
        ...


@runtime_checkable
class ScoresTokens(Protocol):
    """A training backend whose log-probs and entropies of single tokens are shown (``--save-samples``).

    >>> class OfTwoTokens:
    ...     def train(self, shard):
    ...         self.scores = []
    ...         for batch in (batch for step in shard.optimizer_steps for batch in step):
    ...             for branch, first, end in zip(batch.shown, batch.offsets, batch.offsets[1:]):
    ...                 if branch != NOT_SHOWN:
    ...                     logprobs = torch.full([end - first], 0.5).log().numpy()
    ...                     self.scores.append(TokenScores(branch=int(branch), logprobs=logprobs, entropies=None))
    ...         return {}
    ...
    ...     def token_scores(self):
    ...         return self.scores
    >>> backend = OfTwoTokens()
    >>> metrics = backend.train(shard)
    >>> [(each.branch, len(each.logprobs)) for each in backend.token_scores()]
    [(5, 2)]
    """

    def token_scores(self) -> Sequence[TokenScores]:
        """Scores of the ``shown`` branches of the last shard; () on ranks whose shard another rank reports."""
        ...


@runtime_checkable
class TimesParts(Protocol):
    """A training backend that times the parts of a step on its rank; `miles-async watch` shows them.

    >>> class OfOnePart:
    ...     def part_seconds(self):
    ...         return {"forward and backward": 1.5}
    >>> OfOnePart().part_seconds()
    {'forward and backward': 1.5}
    """

    def part_seconds(self) -> Mapping[str, float]:
        """Seconds of the parts of the last step, in their order; of parts that take turns the sum."""
        ...


@runtime_checkable
class LeavesDevice(Protocol):
    """A training backend that engines may share GPUs with (``--colocate``).

    >>> class OneTensor:
    ...     weight = torch.tensor([0.5])
    ...
    ...     def offload(self):
    ...         self.kept = self.weight.cpu().clone()
    ...         self.weight.untyped_storage().resize_(0)  # views of it stay what they are
    ...
    ...     def onload(self):
    ...         self.weight.untyped_storage().resize_(self.kept.nbytes)
    ...         self.weight.copy_(self.kept)
    >>> backend = OneTensor()
    >>> backend.offload()
    >>> backend.weight.untyped_storage().nbytes()
    0
    >>> backend.onload()
    >>> backend.weight
    tensor([0.5000])
    """

    def offload(self) -> None:
        """Free the device's memory until :meth:`onload`, keeping its contents. Nothing is called meanwhile, except to
        write a staged checkpoint.
        """
        ...

    def onload(self) -> None:
        """Undo :meth:`offload`."""
        ...

"""MegatronBackend: one trainer rank, an implementation of ``api.TrainBackend``."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from miles_async.algorithms.objective import Objective
from miles_async.algorithms.step_scale import StepScale
from miles_async.arguments.cluster import DeviceChoice
from miles_async.arguments.critic import CriticArguments
from miles_async.arguments.megatron_settings import megatron_settings
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron.families import hf_config
from miles_async.backends.megatron.families.layout import check_layout
from miles_async.backends.megatron.platform import Platform
from miles_async.errors import CheckpointError
from miles_async.runtime.serialization import decode, encode
from miles_async.types import Picture, SettingValue, TokenScores, TrainShard

if TYPE_CHECKING:
    from miles_async.backends.megatron.checkpoints.checkpoint_writer import StagedSave
    from miles_async.backends.megatron.host_buffer import HostBuffer
    from miles_async.backends.megatron.offload import HostStorages

POLICY, CRITIC = "", "critic"
"""Parts of a checkpoint: the directory itself, and one in it."""


class MegatronBackend:
    """One rank. Construction builds the model; it and all methods are collective: all ranks call them together."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        store: dist.Store,
        model: ModelArguments,
        optimizer: OptimizerArguments,
        critic: CriticArguments,
        total_steps: int,
        temperature: float,
        objective: Callable[[], Objective],
        device: DeviceChoice = "auto",
        ref_hf_checkpoint: Path | None = None,
    ) -> None:
        """``store``: rendezvous of the ranks. ``objective``: makes the objective in this process. ``total_steps``:
        optimizer steps of the whole run, for the learning rate.
        """
        directory = model.directory
        config = hf_config.read_config(directory)
        hf_config.check_model(config, directory)
        check_layout(config, model, world_size)
        platform = Platform.named(device)
        self.device = platform.prepare(local_rank)
        deterministic = megatron_settings(model.megatron_extra).provider.get("deterministic_mode")
        platform.choose_kernels(deterministic=bool(deterministic))

        # After prepare(), which makes megatron importable.
        from megatron.core import parallel_state

        from miles_async.backends.megatron.checkpoints.checkpoint import seed_all
        from miles_async.backends.megatron.kept_weights import KeptWeights
        from miles_async.backends.megatron.laps import Laps
        from miles_async.backends.megatron.learner import Learner, load_critic
        from miles_async.backends.megatron.model.build import load_model
        from miles_async.backends.megatron.model.scores import Scorer
        from miles_async.backends.megatron.optimizer import Training
        from miles_async.backends.megatron.per_rollout import PerRollout, load_reference
        from miles_async.backends.megatron.step import StepRunner
        from miles_async.backends.megatron.step_limits import StepLimits

        # Before megatron-bridge does, which always chooses NCCL. After the timeout of one collective gloo raises, and
        # NCCL's watchdog ends the process (torch 2.13, TORCH_NCCL_ASYNC_ERROR_HANDLING 3): the run loses the rank.
        dist.init_process_group(
            platform.communication_backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(minutes=model.distributed_timeout_minutes),
        )
        seed_all(model.seed)
        self._model_arguments = model
        self._directory = directory
        minimised = objective()
        replays_routing = minimised.routing_replay is not None
        self._model = load_model(directory, model, platform, trainable=True, replays_routing=replays_routing)
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        first = parallel_state.get_tensor_model_parallel_rank() == replica == 0
        self.pipeline_stage = parallel_state.get_pipeline_model_parallel_rank() if first else None
        training = Training(
            model=model, optimizer=optimizer, platform=platform, device=self.device, total_steps=total_steps
        )
        policy = Learner.of(self._model, training)
        self._learners = {POLICY: policy}
        values = None
        if "values" in minimised.needs:
            values = load_critic(critic, directory, minimised.aggregation, training)
            self._learners[CRITIC] = values.learner
        reference, following = None, None
        if "ref_logprobs" in minimised.needs:
            updates = minimised.reference_updates
            reference, following = load_reference(ref_hf_checkpoint, directory, self._model, training, updates)
        self._per_rollout = PerRollout(reference=following, objective=minimised, epochs=optimizer.ppo_epochs)
        kept = None
        if minimised.old_policy == "kept":
            kept = KeptWeights(modules=self._model.modules, most=minimised.kept_versions)
        self._laps = Laps(self.device)
        for learner in self._learners.values():
            self._laps.watch_reduction(learner.model.modules[0])
        self._runner = StepRunner(
            policy=policy,
            kept=kept,
            critic=values,
            reference=reference,
            objective=minimised,
            limits=StepLimits(grad_norm=optimizer.grad_norm_limit, logprob_diff=optimizer.max_logprob_diff),
            scale=StepScale.of(optimizer),
            epochs=optimizer.ppo_epochs,
            total_steps=total_steps,
            mtp_loss_scaling_factor=model.mtp_loss_scaling_factor,
            scorer=Scorer(temperature=temperature, chunk=optimizer.logprob_chunk),
            layout=self._model.pack_layout,
            device=self.device,
            laps=self._laps,
        )
        self._critic_follows = critic.critic_lr is None  # the policy's learning rate
        self._stepped_from: int | None = None  # the version of the last shard
        self._scores: Sequence[TokenScores] = ()  # of its branches that are shown
        self._on_host: HostStorages | None = None
        self._host_buffers: dict[str, HostBuffer] = {}  # of staged saves
        self._staged: list[StagedSave] | None = None

    def train(self, shard: TrainShard) -> dict[str, float]:
        from miles_async.backends.megatron.distributed import complete_parameters

        # The same version twice: the weights in between were not published, and engines have older ones.
        same_weights = shard.target_version != self._stepped_from
        self._stepped_from = shard.target_version
        metrics, self._scores = self._runner.train(shard, same_weights=same_weights, rollouts=self._per_rollout.steps)
        for learner in self._learners.values():
            complete_parameters(learner.model.modules)
        return metrics | self._per_rollout.update(metrics)

    def token_scores(self) -> Sequence[TokenScores]:
        return self._scores

    def part_seconds(self) -> Mapping[str, float]:
        return self._laps.seconds()

    def change(self, values: Mapping[str, SettingValue]) -> None:
        """Apply changed settings to later steps."""
        from miles_async.backends.megatron.optimizer import change_peak

        found = {name: value for name, value in values.items() if isinstance(value, float)}
        if (lr := found.get("lr")) is not None:
            for name, learner in self._learners.items():
                if name == POLICY or self._critic_follows:
                    change_peak(learner.scheduler, lr)
        objective = self._runner.objective.changed(
            entropy=found.get("entropy_coef"), kl_loss=found.get("kl_loss_coef"), kl=found.get("kl_coef")
        )
        self._runner = dataclasses.replace(self._runner, objective=objective)

    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float | None = None,
        pictures: Sequence[tuple[Picture, ...]] = (),
    ) -> list[list[float]]:
        """Log-probs of tokens[1:] of each sequence, on every rank; at the rollout temperature unless given.

        ``pictures``: images of each sequence, or none at all.
        """
        from miles_async.backends.megatron.distributed import from_last_stage
        from miles_async.backends.megatron.packing.pack import pack_sequences

        packed = pack_sequences(sequences, self._runner.layout, self.device, pictures)
        scorer = self._runner.scorer
        if temperature is not None:
            scorer = dataclasses.replace(scorer, temperature=temperature)
        scores, _ = self._runner.policy.model.score([packed], scorer.logprobs)
        flat = from_last_stage(scores[0].tolist() if scores else [], list[float])
        ends = np.cumsum([len(sequence) for sequence in sequences]).tolist()
        return [flat[end - len(sequence) + 1 : end] for end, sequence in zip(ends, sequences, strict=True)]

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, tensor) in a fixed order, in trained dtypes. Every rank must iterate to the end. Omits a tied
        model's lm_head, which engines don't hold and the bridge may repeat.
        """
        for name, tensor in self._model.exported():
            if not (self._model.tied and name == "lm_head.weight"):
                yield name, tensor.detach()

    def offload(self) -> None:
        """Move all tensors from the device to the host, until :meth:`onload`."""
        from miles_async.backends.megatron.offload import HostStorages, gradients, model_tensors, optimizer_tensors

        reference, learners = self._runner.reference, self._learners.values()
        modules = [module for learner in learners for module in learner.model.modules]
        modules += [] if reference is None else reference.modules
        kept = [*model_tensors(modules)]
        for learner in learners:
            kept += optimizer_tensors(learner.optimizer)
        self._on_host = HostStorages(
            (tensor for tensor in kept if tensor.device.type == self.device.type), scratch=gradients(modules)
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo :meth:`offload`."""
        assert self._on_host is not None, "offload() comes first"
        self._on_host.restore()
        self._on_host = None

    def save(self, directory: Path) -> dict[str, str]:
        from miles_async.backends.megatron.checkpoints import checkpoint

        digests: dict[str, str] = {}
        for name, learner in self._learners.items():
            of_files = checkpoint.save(directory / name, learner, self._per_rollout if name == POLICY else None)
            digests |= {str(Path(name, file)): digest for file, digest in of_files.items()}
        return digests

    def stage_save(self, directory: Path) -> None:
        """Copy the state that :meth:`save` writes to the host, for :meth:`write_save`."""
        from miles_async.backends.megatron.checkpoints.checkpoint import stage_save
        from miles_async.backends.megatron.host_buffer import HostBuffer

        self._staged = [
            stage_save(
                directory / name,
                learner,
                self._per_rollout if name == POLICY else None,
                copies=self._host_buffers.setdefault(name, HostBuffer()),
            )
            for name, learner in self._learners.items()
        ]

    def write_save(self) -> bytes:
        """Write this rank's files; not collective, any thread."""
        assert self._staged is not None, "stage_save() comes first"
        return encode([staged.write() for staged in self._staged])

    def finish_save(self, parts: Sequence[bytes]) -> dict[str, str]:
        """Complete the save on rank 0; not collective, any thread. Return digests of all ranks' files."""
        assert self._staged is not None, "stage_save() comes first"
        written = [decode(part, list[bytes]) for part in parts]
        digests: dict[str, str] = {}
        for name, staged, of_ranks in zip(self._learners, self._staged, zip(*written, strict=True), strict=True):
            digests |= {str(Path(name, file)): digest for file, digest in staged.finish(of_ranks).items()}
        return digests

    def load(self, directory: Path) -> None:
        from miles_async.backends.megatron.checkpoints import checkpoint

        if CRITIC in self._learners and directory.is_dir() and not (directory / CRITIC).is_dir():
            raise CheckpointError(
                f"cannot read {directory}: it belongs to a run without a critic; leave --token-advantages gae out, or "
                "start from the weights of --save-hf"
            )
        for name, learner in self._learners.items():
            checkpoint.load(
                directory / name,
                learner,
                self._per_rollout if name == POLICY else None,
                seed=self._model_arguments.seed,
                ahead=self._model.ahead and name == POLICY,
                tower_frozen=self._model_arguments.freeze_vision_tower,
            )
        self._stepped_from = None

    def save_hf(self, directory: Path) -> None:
        """Weights, config and tokenizer files, loadable by transformers and SGLang. Raises CheckpointError."""
        from miles_async.backends.megatron.checkpoints import hf_export

        hf_export.save_hf(directory, self._model, self._directory, self._model_arguments)

    def close(self) -> None:
        """Destroy the process groups, so that this process can build another backend. Collective."""
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.clear_global_router_replay_instances()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

"""Notes before a run starts: flags that work, though perhaps not as expected."""

from __future__ import annotations

import json
from collections.abc import Iterator

from miles_async.arguments import Arguments
from miles_async.arguments.megatron_settings import megatron_settings
from miles_async.arguments.model_files import read_config
from miles_async.arguments.needs import need_notes, value_notes
from miles_async.arguments.server_groups import of_role, server_groups
from miles_async.arguments.words import looks_like_flag
from miles_async.backends.megatron.attention_kernels import FLASH_NOTE, FP32_NOTE, usable_backend
from miles_async.backends.megatron.host import ignored_on_cpu
from miles_async.prompts.tokenizers import digests
from miles_async.runtime.device import choose_device
from miles_async.weights import fp8


def run_notes(arguments: Arguments) -> Iterator[str]:
    """Yield notes on flags that work, though perhaps not as expected."""
    from miles_async.observability.wandb_tracker import wandb_mode

    algorithm = arguments.algorithm
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        yield (
            "--use-kl-loss with --kl-loss-coef 0: the KL to the reference model is computed and logged, which takes a "
            "pass and that model's memory, and does not move the weights; leave both out to save that"
        )
    yield from need_notes(arguments)
    yield from value_notes(arguments)
    if arguments.observability.wandb_shared and wandb_mode(arguments.observability) == "offline":
        yield "--wandb-shared has no effect offline: leave it out"
    yield from _engine_notes(arguments)
    yield from _warm_up_notes(arguments)
    steps, bound = arguments.optimizer_steps_per_rollout, arguments.staleness.bound
    if bound is not None and steps - 1 > bound:
        yield (
            f"{steps} optimizer steps on each rollout batch (--global-batch-size, --num-steps-per-rollout, "
            f"--ppo-epochs): ages count from the first, so the last trains on data that is up to {steps - 1} optimizer "
            f"steps older than its age says, more than the {bound} of the bound (--max-weight-staleness; --on-policy: "
            "0). The ratio to old log-probs and its clip have to make up for that; train/optimizer_lag_mean shows how "
            "much it is. Fewer steps per batch avoid it"
        )
    model = arguments.model
    if model.hf_checkpoint is not None and (extra := read_config(model.hf_checkpoint).get("num_nextn_predict_layers")):
        trained = model.enable_mtp_training
        yield (
            f"num_nextn_predict_layers {extra} of config.json: layers for multi-token prediction are "
            + (
                "trained, and --save-hf writes them, but they are not published"
                if trained
                else "neither trained (--enable-mtp-training) nor published, and --save-hf copies them from "
                "--hf-checkpoint"
            )
            + ". Engines that speculate with them (--sglang-speculative-algorithm) sample the same, and accept fewer "
            "proposals the longer training runs"
        )
    if model.hf_checkpoint is not None and model.trust_remote_code:
        files = ", ".join(f"{name} (sha256 {digest})" for name, digest in digests(model.hf_checkpoint).items())
        yield (
            f"--trust-remote-code: processes that load the tokenizer, and engines, run Python files of --hf-checkpoint "
            f"{model.hf_checkpoint}: {files or 'it has none'}. The trained model is Megatron's all the same"
        )
    settings = megatron_settings(arguments.model.megatron_extra)
    ignored = ignored_on_cpu({**settings.provider, **settings.optimizer, **settings.ddp})
    device = choose_device(arguments.cluster.device)
    if device == "cuda" and not model.bf16:
        yield FP32_NOTE
    backend = str(settings.provider.get("attention_backend", "auto"))
    if device == "cuda" and usable_backend(backend) != backend:
        yield FLASH_NOTE
    if ignored and device == "cpu":
        flags = ", ".join("--" + name.replace("_", "-") for name in ignored)
        yield f"on a CPU these have no effect: {flags}"


def _engine_notes(arguments: Arguments) -> Iterator[str]:
    """Yield notes on flags about engines that these engines make ineffective."""
    if arguments.sides == "trainer":
        return
    groups, engines, weights = server_groups(arguments), arguments.engines, arguments.weights
    if engines.sglang_extra and all(group.external for group in groups):
        flags = ", ".join(f"--sglang-{word[2:]}" for word in engines.sglang_extra if looks_like_flag(word))
        yield f"{flags}: no effect on external engines, which are up already"
    if weights.rollout_quantization == "fp8" and arguments.sides == "rollout":
        yield "--rollout-quantization fp8: no effect without a trainer: engines load --hf-checkpoint as it is"
    elif weights.rollout_quantization == "fp8":
        if any(group.external for group in groups):
            yield (
                "--rollout-quantization fp8: external engines are up already, and have to be started with the same "
                f"quantization_config: {json.dumps(fp8.CONFIG)}"
            )
        if not arguments.algorithm.heeds_rollout_logprobs:
            yield (
                "--rollout-quantization fp8: engines sample from a model that is rounded, and the trainer's is not; "
                "--use-tis corrects for it"
            )
    updated = max(sum(group.num_engines for group in of_role(groups, role)) for role in ("train", "evaluation"))
    if weights.publish_order == "rolling" and updated <= weights.rolling_engines:
        yield (
            f"--publish-order rolling --rolling-engines {weights.rolling_engines} with {updated} engine(s) has no "
            "effect before `miles-async scale` adds some: all of them are updated at once"
        )


def _warm_up_notes(arguments: Arguments) -> Iterator[str]:
    total = arguments.optimizer_steps
    warm_ups = {
        "--lr-warmup-iters": ("--lr", arguments.optimizer.lr_warmup_iters),
        "--critic-lr-warmup-iters": ("--critic-lr", arguments.critic.critic_lr_warmup_iters),
    }
    for flag, (rate, steps) in warm_ups.items():
        if steps > total:
            yield (
                f"{flag} {steps} is longer than the run's {total} optimizer steps: the warm-up takes {total}, so that "
                f"only the last step has {rate}"
            )

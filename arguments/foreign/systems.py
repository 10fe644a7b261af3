"""Flags of other training systems that are not Megatron's."""

from __future__ import annotations

from functools import partial

from miles_async.arguments import Arguments
from miles_async.arguments.foreign.record import Fact, ForeignFlag, ForeignValue
from miles_async.arguments.model_files import read_json
from miles_async.types import JsonObject

_NO_OFFLOAD = "--colocate offloads both sides in turns, and without it nothing is offloaded"
_SCRIPT = "it belongs to a script that prepares files, not to training: remove it"
_FSDP = "Megatron trains here: remove it"
_CI = "it belongs to the tests of another system: remove it"
_MERGED = "adapters are published merged into the weights"
_NO_ZERO_SPREAD = "check_reward_nonzero_std"


_flag = partial(ForeignFlag, origin="slime, miles")
_switch = partial(_flag, takes="nothing")


def _end_tokens(arguments: Arguments, config: JsonObject) -> Fact | None:
    directory = arguments.model.hf_checkpoint
    files = {"generation_config.json": read_json(directory / "generation_config.json") if directory else {}}
    files["config.json"] = config
    named = {file: content.get("eos_token_id") for file, content in files.items()}
    ids = {token for found in named.values() for token in (found if isinstance(found, list) else [found])} - {None}
    said = " and ".join(f"{file} {found}" for file, found in named.items() if found is not None) or "neither"
    return Fact(frozenset(map(str, ids)), f"of --hf-checkpoint, eos_token_id is that of {said}") if config else None


def _other(flag: str, note: str) -> ForeignFlag:
    return _flag(flag, "refused", note, origin="others")


SYSTEMS: tuple[ForeignFlag, ...] = (
    # Cluster.
    _flag("--num-gpus-per-node", "noted", "Ray knows the GPUs of its nodes"),
    _flag("--actor-num-gpus", "refused", "use --actor-num-nodes and --actor-num-gpus-per-node"),
    _flag("--rollout-num-engines", "refused", "use --rollout-num-gpus and --rollout-num-gpus-per-engine"),
    _switch("--offload", "noted", _NO_OFFLOAD),
    _switch("--offload-train", "noted", _NO_OFFLOAD),
    _switch("--offload-rollout", "noted", _NO_OFFLOAD),
    _flag("--train-memory-margin-bytes", "noted", _NO_OFFLOAD),
    _flag(
        "--train-env-vars",
        "refused",
        "set the variables where you start the command; --forward-env says which of them reach every process",
    ),
    _switch("--use-fault-tolerance", "noted", "engines always are watched, restarted and brought up to date"),
    _switch("--use-distributed-post", "noted", "one process sends up to about 700 requests per second"),
    _flag(
        "--sglang-server-concurrency",
        "works",
        "is `--rollout-concurrency-per-engine`",
        ours=("--rollout-concurrency-per-engine",),
    ),
    _switch(
        "--keep-old-actor",
        "refused",
        "use --prox-logp-method snapshots with --use-tis: it keeps the weights of every version that may be trained",
    ),
    # Model and checkpoints.
    _flag("--megatron-to-hf-mode", "noted", "Megatron-Bridge converts weights, both ways", only=("bridge",)),
    _flag("--custom-config-path", "refused", "hooks find their settings by themselves, in a file or the environment"),
    _flag("--dump-details", "refused", "use --save-debug-rollout-data to write batches, --record for all decisions"),
    # Prompts and rollouts.
    _flag(
        "--apply-chat-template-kwargs",
        "refused",
        "set their defaults in chat_template.jinja of --hf-checkpoint, which engines and trainer share",
    ),
    _flag(
        "--rollout-function-path",
        "works",
        "supervised fine-tuning is --loss-type sft_loss; another loop cannot be put in: use "
        "--custom-generate-function-path for one trajectory, --custom-rm-path for the reward, --group-filter and "
        "--group-filter-path to choose what is trained",
        only=("slime.rollout.sft_rollout.generate_rollout", "miles.rollout.sft_rollout.generate_rollout"),
        ours=("--loss-type", "sft_loss", "--n-samples-per-prompt", "1"),
    ),
    _flag(
        "--loss-mask-type", "noted", "turns of the assistant are found by rendering the conversation up to each of them"
    ),
    _switch(
        "--partial-rollout", "noted", "generation always goes on after a publication: --pause-generation-mode says how"
    ),
    _flag(
        "--dynamic-sampling-filter-path",
        "works",
        "use --group-filter zero_variance, or your own filter with --group-filter-path",
        only=(
            f"slime.rollout.filter_hub.dynamic_sampling_filters.{_NO_ZERO_SPREAD}",
            f"miles.rollout.filter_hub.dynamic_sampling_filters.{_NO_ZERO_SPREAD}",
        ),
        ours=("--group-filter", "zero_variance"),
    ),
    ForeignFlag(
        flag="--rollout-stop-token-ids",
        origin="slime, miles",
        verdict="checked",
        takes="many",
        note="engines end at the tokens that generation_config.json or config.json names, so that each must be there",
        fact=_end_tokens,
    ),
    _flag("--over-sampling-batch-size", "noted", "a group that a filter rejects is replaced by one more, at once"),
    _flag(
        "--eval-config", "refused", "use --eval-prompt-data NAME FILE ... and the other --eval-* flags, for all of them"
    ),
    _flag("--num-epoch", "refused", "use --num-rollout (rollout steps): epochs × rows ÷ --rollout-batch-size"),
    # Batches and loss.
    _switch("--balance-data", "noted", "tokens always are balanced over data-parallel ranks"),
    _switch(
        "--use-dynamic-batch-size", "noted", "samples always are packed: --max-tokens-per-gpu sizes a micro-batch"
    ),
    _switch("--disable-compute-advantages-and-returns", "noted", "--loss-type sft_loss has none"),
    _flag("--critic-load", "refused",
          "use --critic-hf-checkpoint, a Hugging Face directory; a run that resumes finds its critic in --load"),
    _flag("--critic-save", "refused", "the critic is a part of the checkpoints in --save: remove it"),
    _flag(
        "--opd-type", "noted", "the teacher is a frozen group of --server-groups, whose engines score", only=("sglang",)
    ),
    _flag("--opd-teacher-load", "refused", "name the teacher as model of a frozen group in --server-groups"),
    _flag("--opd-teacher-ckpt-step", "refused", "name the teacher as model of a frozen group in --server-groups"),
    _flag("--custom-advantage-function-path", "refused",
          "use --advantage-estimator module:attr (from groups of samples) or --token-advantages module:attr (on the "
          "trainer)"),
    _flag("--custom-loss-function-path", "refused", "use --policy-loss module:attr"),
    _flag("--custom-pg-loss-reducer-function-path", "refused", "use --loss-aggregation module:attr"),
    _flag("--custom-tis-function-path", "refused", "use --use-tis and --tis-mode module:attr"),
    # Adapters.
    _flag(
        "--lora-dropout", "noted", "engines have no dropout, and the trainer's log-probs are to be theirs", only=("0",)
    ),
    _flag("--exclude-modules", "refused", "use --target-modules: it names the layers that get an adapter"),
    _switch("--lora-sync-from-tensor", "noted", _MERGED),
    _switch("--lora-base-cpu-backup", "noted", _MERGED),
    _switch("--check-lora-weight-equal", "noted", "every publication is compared: --verify-weights"),
    _switch("--experts-shared-outer-loras", "refused", "every expert has an adapter of its own: remove it"),
    _flag("--multi-lora-n-adapters", "noted", "a run trains one adapter per layer", only=("0",)),
    # FSDP.
    _flag("--attn-implementation", "refused", f"it is for transformers' models. {_FSDP}"),
    _switch("--gradient-checkpointing", "refused", "use --recompute-granularity full"),
    _switch("--fsdp-cpu-offload", "refused", "Megatron trains here: use --optimizer-cpu-offload"),
    # Around a run.
    _flag("--wandb-key", "refused", "set WANDB_API_KEY in the environment"),
    _switch("--ci-test", "refused", _CI),
    _switch("--ci-disable-kl-checker", "refused", _CI),
    *(_flag(flag, "refused", _SCRIPT) for flag in ("--model-dir", "--save-dir", "--local-dir", "--strategy",
                                                   "--block-size", "--max-workers")),
    _switch("--force", "refused", "it belongs to `ray stop`, not to training: remove it"),
    # Other systems, and what they call the same.
    _other("--max-async-level",
           "it meant two things: use --max-weight-staleness (oldest age that is trained) and --max-rollout-lead "
           "(batches admitted ahead of the trainer)"),
    _other("--max-off-policy-steps", "use --max-weight-staleness"),
    _other("--staleness-threshold", "use --max-weight-staleness"),
    _other("--async-steps", "use --max-rollout-lead (batches ahead) and --max-weight-staleness (age)"),
    _other("--trigger-parameter-sync-step", "use --update-weights-interval"),
    _other("--learning-rate", "use --lr"),
    _other("--lora-target-modules", "use --target-modules"),
    _other("--tokenizer-path", "the tokenizer comes with --hf-checkpoint"),
)  # fmt: skip

VALUES: tuple[ForeignValue, ...] = (
    ForeignValue(
        flag="--rm-type", value="deepscaler", ours=("--rm-type", "math"),
        note="`math` compares the answer after the last </think>, and of a response without one the whole",
    ),
    *(
        ForeignValue(
            flag="--advantage-estimator", value=loss, ours=("--advantage-estimator", "grpo", "--policy-loss", loss),
            note="its advantages are those of grpo",
        )
        for loss in ("gspo", "cispo")
    ),
    ForeignValue(flag="--loss-type", value="custom_loss", ours=(), note="use --policy-loss module:attr"),
    ForeignValue(
        flag="--advantage-estimator", value="reinforce_plus_plus",
        ours=("--advantage-estimator", "reinforce", "--normalize-advantages"),
        note="with --kl-coef above 0 give --token-advantages kl_in_reward, too: its KL is in the reward",
    ),
    ForeignValue(
        flag="--advantage-estimator", value="reinforce_plus_plus_baseline",
        ours=("--advantage-estimator", "grpo", "--no-grpo-std-normalization", "--normalize-advantages"),
        note="the group's mean is its baseline; in place of --kl-coef, which takes the KL off each token, give "
        "--use-kl-loss --kl-loss-coef",
    ),
    *(
        ForeignValue(
            flag="--advantage-estimator", value=name,
            ours=("--advantage-estimator", "reinforce", "--token-advantages", "gae"),
            note="the trainer computes advantages of tokens from rewards and the values of its critic",
        )
        for name in ("ppo", "gae")
    ),
    ForeignValue(
        flag="--lora-type", value="canonical_lora", ours=(),
        note="projections that Megatron computes as one layer have one adapter: give --lora-type lora",
    ),
    ForeignValue(
        flag="--train-backend", value="fsdp", ours=(), note="it trains with FSDP: Megatron trains here, remove it"
    ),
)  # fmt: skip

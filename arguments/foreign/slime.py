"""Flags of slime and miles: what becomes of each."""

from __future__ import annotations

from functools import partial

from miles_async.arguments import Arguments
from miles_async.arguments.foreign.megatron import FLAGS_WIN, SAME_FLAGS
from miles_async.arguments.foreign.record import Fact, ForeignFlag, renamed, rows
from miles_async.arguments.model_files import read_json
from miles_async.types import JsonObject

_noted = partial(rows, "noted", origin="slime, miles")
_refused = partial(rows, "refused", origin="slime, miles")
_other = partial(rows, "refused", origin="others")
_works = partial(renamed, origin="slime, miles")


def _held_out(flag: str, field: str) -> ForeignFlag:
    """A column of held-out files, which must be the prompts' column here."""
    ours = f"--{field.replace('_', '-')}"

    def fact(arguments: Arguments, _: JsonObject) -> Fact:
        value = getattr(arguments.data, field)
        return Fact(value, f"held-out files have the columns of --prompt-data, and {ours} is {value}")

    note = f"must be `{ours}`: held-out files have the columns of `--prompt-data`"
    return ForeignFlag(flag, "checked", note, origin="slime, miles", fact=fact)


def _end_tokens(arguments: Arguments, config: JsonObject) -> Fact | None:
    directory = arguments.model.hf_checkpoint
    files = {"generation_config.json": read_json(directory / "generation_config.json") if directory else {}}
    files["config.json"] = config
    named = {file: content.get("eos_token_id") for file, content in files.items()}
    ids = {token for found in named.values() for token in (found if isinstance(found, list) else [found])} - {None}
    said = " and ".join(f"{file} {found}" for file, found in named.items() if found is not None) or "neither"
    return Fact(frozenset(map(str, ids)), f"of --hf-checkpoint, eos_token_id is that of {said}") if config else None


_ALWAYS_WATCHED = "engines always are watched, restarted and brought up to date; --max-run-restarts restarts the run"
_CPU_OFFLOAD = "--optimizer-cpu-offload --use-precision-aware-optimizer"
_OFFLOAD = "--colocate offloads both sides in turns, and without it nothing is offloaded"
_DEBUGGING = "it is for debugging the other system: remove it"
_TESTS = "it belongs to the tests of another system: remove it"
_CHANGES_METRICS = "metrics do not depend on it: docs/metrics.md says where they are listed"
_ONE_ADAPTER = "a run trains one adapter per layer: remove it"
_NONZERO_STD = "rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
_NOT_ABORTED = "miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted"
_FROZEN = "a teacher is a frozen group of --server-groups"
_NEVER_WAITS = "generation never waits for the trainer, but with --on-policy"
FULLY_ASYNC_LOOPS = (
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "fully_async_rollout.generate_rollout_fully_async",  # an example's, in earlier versions
    "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn",
)
"""Values of --rollout-function-path that do what every run does here."""
ENVIRONMENT = {"wandb-key": "WANDB_API_KEY", "wandb-host": "WANDB_BASE_URL", "wandb-team": "WANDB_ENTITY"}
"""Flag → the variable that says the same here."""
_EVALUATION = 'for separate engines, use a group with role = "evaluation" in --server-groups'

SLIME: tuple[ForeignFlag, ...] = (
    # Cluster and memory.
    *_noted("Ray knows the GPUs of its nodes", one="num-gpus-per-node"),
    *_refused("use --actor-num-nodes and --actor-num-gpus-per-node", one="actor-num-gpus"),
    *_refused("use --rollout-num-gpus and --rollout-num-gpus-per-engine", one="rollout-num-engines"),
    *_refused("set the variables where you start the command; --forward-env says which of them reach every process",
            one="train-env-vars"),
    *_noted("engines always are watched, restarted and brought up to date", switches="use-fault-tolerance"),
    *_noted("one process sends up to about 700 requests per second", switches="use-distributed-post"),
    *_noted("NCCL connects GPUs", one="distributed-backend", only=("nccl",)),
    *_noted("the critic is trained by the ranks of the policy", one="critic-num-nodes critic-num-gpus-per-node"),
    *_noted(_OFFLOAD, one="train-memory-margin-bytes", switches="offload offload-train offload-rollout "
            "no-offload-train no-offload-rollout rematerialize-param-from-master-weight "
            "check-rematerialize-param-from-master-weight", many="offload-rollout-level"),
    *_noted(_OFFLOAD, one="offload-train-target", only=("cpu",)),
    *_refused(f"nothing is kept on disk: use {_CPU_OFFLOAD}", switches="stream-optimizer-state-to-disk",
            one="stream-optimizer-state-moment-dtype offload-train-disk-dir offload-train-disk-chunk-mb"),
    *_refused("trainer ranks stay: use --colocate to release their memory in turns", switches="release-train"),
    *_refused("all ranks are one group: remove it, --max-run-restarts restarts the run after a fault",
            switches="indep-dp delay-split-train-data-by-dp"),
    *_noted("a checkpoint is read to where it is used", switches="low-memory-resume"),
    *_refused("use --host: agents reach the run's servers there", switches="pin-rollout-manager-to-head",
            one="session-server-ip"),
    *_refused("the address of the router is chosen by the run: remove it", one="sglang-router-ip"),
    *_refused("use --request-timeout", one="sglang-router-request-timeout-secs"),
    *_noted("the run chooses ports, by --port-range", many="session-server-port"),
    *_refused("set http_proxy and no_proxy in the environment, which reach every process", one="http-proxy"),
    *_noted("batches go through Ray's object store", one="rollout-data-transport", only=("object-store",)),
    *_noted("batches go through Ray's object store", one="object-store-backend", only=("ray",)),
    *_refused("batches go through Ray's object store: remove it",
            one="mooncake-store-init-kwargs mooncake-replica-num"),
    *_noted(_ALWAYS_WATCHED, one="rollout-health-check-interval rollout-health-check-timeout "
            "rollout-health-check-first-wait control-server-port mini-ft-controller-poll-interval "
            "mini-ft-controller-resume-delay", switches="mini-ft-controller-enable", many="ft-components"),
    # Model.
    *_noted("Megatron-Bridge converts weights, both ways", one="megatron-to-hf-mode", only=("bridge",)),
    *_refused("hooks find their settings by themselves, in a file or the environment", one="custom-config-path"),
    *_noted("it is for transformers' models, and Megatron trains here", one="attn-implementation"),
    _works("--gradient-checkpointing", "--recompute-granularity", "full", takes="nothing"),
    _works("--fsdp-cpu-offload", *_CPU_OFFLOAD.split(), takes="nothing", why=": weights and gradients stay on GPUs"),
    *_noted("it is for FSDP, and Megatron trains here", one="fsdp-cpu-backend dp-replicate-size",
            switches="fsdp-state-dict-cpu-offload no-fsdp-state-dict-cpu-offload keep-fp32-master"),
    *_refused("use --lr-warmup-fraction", one="warmup-ratio"),
    *_noted("Megatron-Bridge pads the vocabulary of config.json", one="padded-vocab-size"),
    *_noted("model_type of config.json names the family", one="model-name"),
    *_refused("layers come from Megatron-Bridge, by the model_type of config.json: remove it",
            one="custom-model-provider-path qwen-gdn-backend linear-attention-backend"),
    *_noted("layers come from Megatron-Bridge, with the same result", switches="allgather-cp"),
    *_refused("use --megatron-dsa-kernel-backend", one="dsa-attention-backend"),
    *_noted("the indexer of sparse attention is never trained", switches="freeze-indexer"),
    *_noted("the trainer's is torch.topk; for engines use --sglang-dsa-topk-backend", one="miles-dsa-topk-backend",
            only=("torch",)),
    *_refused("0.5 MB of choices per token of DeepSeek-V3.2 are not carried: use --sglang-dsa-topk-backend torch, by "
            "which engines choose as the trainer does", switches="use-indexer-replay use-rollout-indexer-replay"),
    *_refused("all weights are trained, or adapters alone: use --lora-rank and --target-modules",
            many="only-train-params-name-list freeze-params-name-list"),
    *_refused("training in 8 or 4 bits is not implemented: use --bf16", many="extra-high-precision-layers-hf "
            "extra-high-precision-layers-megatron megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules "
            "megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules"),
    *_refused("the critic has its own flags: use --critic-hf-checkpoint, --critic-lr", one="megatron-config-path"),
    *_refused("use --ref-hf-checkpoint, a Hugging Face directory", one="ref-ckpt-step"),
    *_refused("put the template into chat_template.jinja of --hf-checkpoint, which engines and trainer share",
            one="chat-template-path"),
    *_noted("samples are packed", one="qkv-format", only=("thd", "bshd")),
    *_noted("samples are packed", one="data-pad-size-multiplier"),
    # Publication.
    *(ForeignFlag(f"--update-weight-{name}", "works", f"{value} is `{ours}`", origin="slime, miles",
                  ours=tuple(ours.split()), only=(value,),
                  idle=dict.fromkeys(idle.split(), "process groups carry whole tensors by default"))
      for name, value, ours, idle in (
          ("mode", "delta", "--weight-delta xor", "full"), ("transport", "disk", "--weight-transport disk", "nccl"),
          ("transfer-mode", "disk-delta", "--weight-transport disk --weight-delta xor", "broadcast p2p"),
      )),
    *_noted("weights come by --weight-transport", one="sglang-remote-instance-weight-loader-ib-device",
            switches="sglang-remote-instance-weight-loader-start-seed-via-transfer-engine"),
    *_noted("for the other encoding use --weight-delta overwrite", one="update-weight-delta-encoding", only=("xor",)),
    *_noted("digests of all tensors are compared: --verify-weights", one="update-weight-delta-checksum"),
    *_noted("engines change the weights in their memory, and hold no files of them",
            one="update-weight-local-checkpoint-dir"),
    *_refused("staged files are removed once engines have them: use --save-hf to keep weights",
            switches="update-weight-disk-keep-files"),
    *_refused("use --weight-transport module:attr",
            one="custom-update-weight-post-write-path p2p-transfer-num-workers p2p-transfer-timeout"),
    *_noted("every publication is compared: --verify-weights",
            switches="check-weight-update-equal check-lora-weight-equal"),
    *_refused("every publication is compared: use --verify-weights, --verify-weights-skip",
            one="check-weight-update-selector", many="check-weight-update-skip-list",
            switches="check-weight-update-allow-quant-error"),
    # Prompts and rollouts.
    *_refused("set their defaults in chat_template.jinja of --hf-checkpoint, which engines and trainer share",
            one="apply-chat-template-kwargs"),
    ForeignFlag(
        "--rollout-function-path",
        "works",
        "supervised fine-tuning is --loss-type sft_loss; another loop cannot be put in: use "
        "--custom-generate-function-path for one trajectory, --custom-rm-path for the reward, --group-filter and "
        "--group-filter-path to choose what is trained",
        origin="slime, miles",
        ours=("--loss-type", "sft_loss", "--n-samples-per-prompt", "1"),
        only=("slime.rollout.sft_rollout.generate_rollout", "miles.rollout.sft_rollout.generate_rollout"),
        idle=dict.fromkeys(FULLY_ASYNC_LOOPS, _NEVER_WAITS),
    ),
    ForeignFlag(
        "--dynamic-sampling-filter-path",
        "works",
        "use --group-filter zero_variance, or your own filter with --group-filter-path",
        origin="slime, miles",
        ours=("--group-filter", "zero_variance"),
        only=(f"slime.{_NONZERO_STD}", f"miles.{_NONZERO_STD}"),
        idle={_NOT_ABORTED: "what was aborted is continued or tried again before it is trained"},
    ),
    ForeignFlag(
        "--rollout-stop-token-ids",
        "checked",
        "engines end at the tokens that generation_config.json or config.json names, so that each must be there",
        origin="slime, miles",
        takes="many",
        fact=_end_tokens,
    ),
    *_noted("turns of the assistant are found by rendering the conversation up to each of them", one="loss-mask-type"),
    *_noted("generation always continues after a publication: --pause-generation-mode says how",
            switches="partial-rollout"),
    *_noted("a group that a filter rejects is replaced by one more, at once", one="over-sampling-batch-size"),
    *_refused("prompts come from --prompt-data: write them to a file first", one="data-source-path",
            switches="disable-rollout-global-dataset"),
    *_refused("a run that resumes (--load) knows its step: remove it", one="start-rollout-id"),
    *_refused("use --rollout-max-prompt-len and --rollout-max-response-len, which add up to it",
            one="rollout-max-context-len"),
    *_noted("samples keep the tokens as they were sampled; their text lacks only special tokens that bound it",
            switches="rollout-skip-special-tokens"),
    *_refused("use --max-token-age: it masks tokens of older weights", switches="mask-offpolicy-in-partial-rollout"),
    *_refused("use --custom-generate-function-path, which makes the sample", one="rollout-sample-hook-path"),
    *_refused("use --group-filter-path (groups to replace) and --batch-order", one="buffer-filter-path "
            "rollout-sample-filter-path rollout-all-samples-process-path custom-async-data-buffer-path"),
    *_refused("use --advantage-estimator module:attr (from groups of samples) or --token-advantages module:attr",
            one="rollout-data-postprocess-path custom-reward-post-process-path "
            "custom-convert-samples-to-train-data-path"),
    *_refused("use --group-rm-path module:attr in place of --custom-rm-path: it is called with (prompt, samples)",
            switches="group-rm"),
    *_refused("use --custom-rm-path module:attr: a reward is a number", one="reward-key eval-reward-key"),
    *_noted(_NEVER_WAITS, switches="fully-async"),
    *_refused("use --rollout-concurrency-per-engine (samples in flight) and --max-rollout-lead (batches ahead)",
            one="rollout-submission-granularity async-max-concurrent-samples async-data-buffer-capacity-factor"),
    *_refused("use --stale-group-action: recycle is retry, drop is drop", one="async-unused-samples-handler"),
    _works("--generate-max-turns", "--max-turns"),
    _works("--generate-tool-call-parser", "--tool-call-parser"),
    *_refused("tools come from --environment-path or --mcp-server",
            one="generate-tool-specs-path generate-execute-tool-function-path"),
    *_refused("use --agent-path module:attr", one="custom-agent-function-path"),
    *_refused("trajectories end at --max-tokens-per-gpu: use --sglang-context-length to end them earlier",
            one="max-seq-len"),
    *_refused("trajectories come from --environment-path, --agent-path or --agent-command",
            one="rollout-buffer-url fetch-trajectory-retry-times min-batch-collection-ratio rollout-task-type"),
    *_noted("each engine does prefill and decoding, with the same results", one="prefill-num-servers"),
    *_refused("use --server-groups for engines that differ, and --sglang-X for SGLang's own flags",
            one="sglang-config"),
    *_noted("smg is the router", switches="use-miles-router",
            one="miles-router-timeout miles-router-max-connections miles-router-health-check-failure-threshold"),
    *_noted("agents have a session server: --agent-path, --agent-command", many="use-session-server"),
    *_noted("turns of a conversation are the tokens that were sampled", one="tito-model"),
    *_refused("sessions are trained as they were: remove it, docs/agents.md says how",
            one="session-message-matcher session-sample-picker-path session-sample-postprocessor-path"),
    # Evaluation.
    *_noted("the first and the last weights are always evaluated", switches="skip-eval-before-train"),
    *_refused("held-out prompts are answered as in training: use --custom-generate-function-path and --custom-rm-path",
            one="eval-function-path"),
    *_refused("use max_prompt_len in the file of --eval-config: held-out prompts may else be as long as the model "
            "allows", one="eval-max-prompt-len"),
    *_refused("use --eval-max-response-len: held-out prompts may be as long as the model allows",
            one="eval-max-context-len"),
    *_refused("an answer ends where the model ends it: remove it", one="eval-min-new-tokens"),
    *_refused(_EVALUATION, one="eval-num-gpus eval-num-gpus-per-engine eval-hf-dir eval-max-in-flight "
            "eval-overflow-policy eval-keep-snapshots"),
    # Batches and loss.
    *_noted("tokens always are balanced over data-parallel ranks", switches="balance-data"),
    *_noted("samples always are packed: --max-tokens-per-gpu sizes a micro-batch", switches="use-dynamic-batch-size"),
    *_noted("--loss-type sft_loss has none", switches="disable-compute-advantages-and-returns"),
    *_refused("use --prox-logp-method snapshots with --use-tis: it keeps the weights of every version that may be "
            "trained", switches="keep-old-actor"),
    *_refused("use --critic-hf-checkpoint, a Hugging Face directory; a run that resumes finds its critic in --load",
            one="critic-load"),
    *_refused("the critic is a part of the checkpoints in --save: remove it", one="critic-save"),
    *_noted("the teacher is a frozen group of --server-groups, whose engines score", one="opd-type",
            only=("sglang", "megatron")),
    *_refused("name the teacher as model of a frozen group in --server-groups",
            one="opd-teacher-load opd-teacher-ckpt-step"),
    *_refused("use --advantage-estimator module:attr (from groups of samples) or --token-advantages module:attr (on "
            "the trainer)", one="custom-advantage-function-path"),
    *_refused("use --policy-loss module:attr", one="custom-loss-function-path"),
    *_refused("use --loss-aggregation module:attr", one="custom-pg-loss-reducer-function-path"),
    *_refused("use --use-tis and --tis-mode module:attr", one="custom-tis-function-path"),
    *_noted("tokens are balanced over data-parallel ranks", switches="balance-by-flops"),
    *_noted("log-probs come in chunks, --logprob-chunk, of micro-batches of --max-tokens-per-gpu",
            one="log-probs-max-tokens-per-gpu log-probs-chunk-size", switches="recompute-loss-function"),
    *_refused("batches are always full: choose --global-batch-size that divides them",
            switches="allow-partial-train-step disable-rollout-trim-samples"),
    *_refused("leave out --global-batch-size: a rollout batch is one optimizer step then",
            switches="use-dynamic-global-batch-size"),
    *_noted("checkpoints hold all that a run resumes with; --save-hf exports weights alone",
            switches="no-save-optim no-save-rng"),
    *_refused("--load resumes all of a run: leave it out to start from the weights of --hf-checkpoint",
            switches="finetune no-load-optim no-load-rng"),
    *_refused("use --save-interval", one="save-trigger-sentinel"),
    *_refused("use --kl-loss-type module:attr", switches="use-unbiased-kl"),
    *_refused("use --advantage-estimator reinforce: its advantage is the reward",
            switches="disable-rewards-normalization"),
    *_noted("trainer and engines are always compared", switches="get-mismatch-metrics"),
    *_noted(FLAGS_WIN, switches="no-use-checkpoint-lr-scheduler override-lr-scheduler no-override-lr-scheduler"),
    *_refused(SAME_FLAGS, switches="use-checkpoint-lr-scheduler"),
    *_refused("AdamW keeps its state: remove it", switches="reset-optimizer-states use-stateless-adam"),
    *_refused("use --on-policy, or --use-rollout-logprobs: log-probs of trainer and engines differ by rounding",
            switches="true-on-policy-mode recompute-logprobs-via-prefill"),
    *_refused("use --use-rollout-logprobs, without which the old log-probs need that pass",
            switches="skip-actor-forward-only"),
    *_noted("--use-opd compares sampled tokens", one="opd-log-prob-top-k", only=("0",)),
    *_refused("--use-opd compares sampled tokens with one teacher: remove it",
            one="opd-top-k-strategy opd-reward-weight-mode opd-teacher-key",
            switches="opd-topk-per-position", many="opd-teacher-urls"),
    # A teacher's own server.
    *_refused(f"{_FROZEN}: give its table a port, that of its router", one="teacher-port"),
    *_refused(f"{_FROZEN}, and the run waits until its engines are up: remove it",
            one="teacher-warmup-port teacher-warmup-timeout-s",
            switches="megatron-server-warmup no-megatron-server-warmup"),
    *_refused(f"{_FROZEN}, and SGLang computes its log-probs: remove it",
            one="teacher-sample-reduction-chunk-size teacher-label-reduction-chunk-size"),
    *_refused(f"{_FROZEN}: give its table sglang = {{ context-length = ... }}", one="megatron-server-max-length"),
    *_refused(f"{_FROZEN}, which keeps its weights: remove it", one="megatron-server-update-timeout-s"),
    *_refused("the trainer calls no hook there: remove it", one="custom-megatron-init-path "
            "custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path "
            "custom-megatron-post-save-hook-path"),
    # Adapters.
    *_noted("engines have no dropout, and the trainer's log-probs are to be theirs", one="lora-dropout", only=("0",)),
    *_refused("use --target-modules: it names the layers that get an adapter", one="exclude-modules"),
    *_refused("every expert has its own adapter: remove it", switches="experts-shared-outer-loras"),
    *_noted("a run trains one adapter per layer", one="multi-lora-n-adapters", only=("0",)),
    *_noted("adapters are published merged into the weights",
            switches="no-sglang-lora-use-virtual-experts lora-sync-from-tensor lora-base-cpu-backup"),
    *_refused("adapters are always published: remove it", switches="lora-train-only"),
    *_refused(_ONE_ADAPTER, many="multi-lora-adapter", switches="multi-lora-disable-service-mode",
            one="multi-lora-idle-poll-s multi-lora-http-server-path multi-lora-backend-path multi-lora-api-port "
            "multi-lora-max-adapter-global-batch-size multi-lora-max-coalesce-wait-s multi-lora-max-empty-wait-s"),
    # Around a run.
    *(row for flag, name in ENVIRONMENT.items() for row in _refused(f"set {name} in the environment", one=flag)),
    *_noted("--save-debug-rollout-data writes batches, --record all decisions", one="dump-details"),
    *_noted("`miles-async watch` shows a run", switches="use-miles-dashboard dashboard-forward-prometheus",
            one="dashboard-flush-interval dashboard-gpu-sample-interval dashboard-sglang-metrics "
            "dashboard-sglang-scrape-interval dashboard-sglang-scrape-mode"),
    *_refused("it belongs to a script that prepares files, not to training: remove it",
            one="model-dir save-dir local-dir strategy block-size max-workers"),
    *_refused("it belongs to `ray stop`, not to training: remove it", switches="force"),
    *_noted(_CHANGES_METRICS, one="log-reward-category mfu-peak-tflops",
            switches="log-multi-turn log-passrate log-correct-samples wandb-always-use-train-step"),
    *_noted("--log-entropy computes and logs it", switches="use-rollout-entropy"),
    *_noted("files are in --run-dir, whose name is the run's", one="wandb-dir wandb-run-name",
            switches="disable-wandb-random-suffix"),
    *_noted("event files are in --tensorboard-dir, by default in --run-dir, whose name is the run's",
            one="tb-project-name tb-experiment-name"),
    *_refused("use --custom-tracker-path module:attr; metrics.jsonl has every metric",
            one="custom-rollout-log-function-path custom-eval-rollout-log-function-path"),
    *_refused("use --load-debug-rollout-data", one="load-forge-rollout-data load-debug-rollout-data-subsample"),
    *_refused("use --save-debug-rollout-data",
            one="save-debug-train-data save-debug-trajectory-data save-debug-event-data"),
    *_refused("use --debug-rollout-only or --debug-train-only",
            switches="debug-skip-weight-update debug-disable-optimizer"),
    *_refused("use --num-rollout", one="debug-exit-after-rollout"),
    *_refused("use --profile-step, --profile-ranks and --record-memory-history, which write into the run directory",
            one="memory-snapshot-dir memory-snapshot-num-steps memory-snapshot-path memory-recorder profile-step-start "
            "profile-step-end", many="profile-target", switches="use-pytorch-profiler"),
    *_refused(_DEBUGGING, one="dumper-dir dumper-source-patcher-config-inference dumper-source-patcher-config-train "
            "witness-buffer-size env-report", many="dumper-inference dumper-fwd-only dumper-fwd-bwd",
            switches="dumper-enable enable-witness enable-event-analyzer save-local-weight-checksum "
            "debug-deterministic-collective"),
    *_refused(_TESTS, one="ci-train-rollout-logprob-abs-diff-threshold ci-save-grad-norm ci-load-grad-norm "
            "ci-ft-test-actions ci-inject-rollout-data-path ci-inject-rollout-data-start-rollout-id "
            "ci-inject-rollout-data-min-match-ratio ci-metric-checker-key ci-metric-checker-threshold",
            switches="ci-test ci-disable-kl-checker ci-disable-logprobs-checker ci-disable-weight-update-checker "
            "ci-save-model-hash ci-check-model-hash"),
    # Megatron's, which their scripts give.
    *_noted("no step is taken with gradients that are not finite; --bad-step-action decides what follows",
            switches="no-check-for-nan-in-loss-and-grad"),
    _works("--sglang-server-concurrency", "--rollout-concurrency-per-engine"),
    _works("--disable-grpo-std-normalization", "--no-grpo-std-normalization", takes="nothing"),
    _works("--rollout-external-engine-addrs", "--rollout-external", takes="many"),
    _works("--update-weight-disk-dir", "--weight-staging-dir"),
    _works("--observe-training-entropy", "--log-entropy", takes="nothing"),
    _held_out("--eval-input-key", "input_key"),
    _held_out("--eval-label-key", "label_key"),
    _held_out("--eval-tool-key", "tool_key"),
)  # fmt: skip

OTHERS: tuple[ForeignFlag, ...] = (
    *_other("it meant two things: use --max-weight-staleness (oldest age that is trained) and --max-rollout-lead "
            "(batches admitted ahead of the trainer)", one="max-async-level"),
    *_other("use --max-weight-staleness", one="max-off-policy-steps staleness-threshold"),
    *_other("use --max-rollout-lead (batches ahead) and --max-weight-staleness (age)", one="async-steps"),
    *_other("use --update-weights-interval", one="trigger-parameter-sync-step"),
    *_other("use --lr", one="learning-rate"),
    *_other("use --target-modules", one="lora-target-modules"),
    *_other("the tokenizer comes with --hf-checkpoint", one="tokenizer-path"),
)  # fmt: skip
"""Aliases of these flags in further systems."""

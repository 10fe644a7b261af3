"""Flags of slime and miles, grouped by what becomes of them; those that need more than a reason: ``systems.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from miles_async.arguments import Arguments
from miles_async.arguments.foreign.record import Fact, ForeignFlag, Takes, Verdict
from miles_async.types import JsonObject


@dataclass(frozen=True, slots=True)
class _Reason:
    """Flags with one note; each field holds names without ``--``, by the values that they take."""

    verdict: Verdict
    note: str
    _: KW_ONLY
    one: str = ""
    switches: str = ""
    many: str = ""
    only: tuple[str, ...] = ()  # as in ForeignFlag

    def rows(self) -> Iterator[ForeignFlag]:
        """Yield a row for each flag."""
        takes: dict[Takes, str] = {"one": self.one, "nothing": self.switches, "many": self.many}
        for count, names in takes.items():
            for name in names.split():
                yield ForeignFlag(
                    f"--{name}", self.verdict, self.note, origin="slime, miles", takes=count, only=self.only
                )


def _held_out(flag: str, field: str) -> ForeignFlag:
    """A column of held-out files, which are those of the prompts here."""
    ours = f"--{field.replace('_', '-')}"

    def fact(arguments: Arguments, _: JsonObject) -> Fact:
        value = getattr(arguments.data, field)
        return Fact(value, f"held-out files have the columns of --prompt-data, and {ours} is {value}")

    note = f"must be `{ours}`: held-out files have the columns of `--prompt-data`"
    return ForeignFlag(flag, "checked", note, origin="slime, miles", fact=fact)


def _works(flag: str, *ours: str, takes: Takes = "one") -> ForeignFlag:
    return ForeignFlag(flag, "works", f"is `{' '.join(ours)}`", origin="slime, miles", takes=takes, ours=ours)


_ALWAYS_WATCHED = "engines always are watched, restarted and brought up to date; --max-run-restarts restarts the run"
_OFFLOAD = "--colocate offloads both sides in turns, and without it nothing is offloaded"
_DEBUGGING = "it is for debugging the other system: remove it"
_TESTS = "it belongs to the tests of another system: remove it"
_CHANGES_METRICS = "metrics do not depend on it: docs/metrics.md lists them"
_FAMILY = "models with sparse or linear attention are not trained: remove it"
_ONE_ADAPTER = "a run trains one adapter per layer: remove it"
_EVALUATION = 'for engines of their own, use a group with role = "evaluation" in --server-groups'

_REASONS = (
    # Cluster and memory.
    _Reason("noted", "NCCL connects GPUs", one="distributed-backend", only=("nccl",)),
    _Reason("noted", "the critic is trained by the ranks of the policy",
            one="critic-num-nodes critic-num-gpus-per-node"),
    _Reason("noted", _OFFLOAD, switches="no-offload-train no-offload-rollout rematerialize-param-from-master-weight "
            "check-rematerialize-param-from-master-weight", many="offload-rollout-level"),
    _Reason("noted", _OFFLOAD, one="offload-train-target", only=("cpu",)),
    _Reason("refused", "nothing is kept on disk: use --optimizer-cpu-offload",
            switches="stream-optimizer-state-to-disk",
            one="stream-optimizer-state-moment-dtype offload-train-disk-dir offload-train-disk-chunk-mb"),
    _Reason("refused", "trainer ranks stay: use --colocate to release their memory in turns", switches="release-train"),
    _Reason("refused", "all ranks are one group: remove it, --max-run-restarts restarts the run after a fault",
            switches="indep-dp delay-split-train-data-by-dp"),
    _Reason("noted", "a checkpoint is read to where it is used", switches="low-memory-resume"),
    _Reason("refused", "use --host: agents reach the run's servers there", switches="pin-rollout-manager-to-head",
            one="session-server-ip"),
    _Reason("refused", "the address of the router is chosen by the run: remove it", one="sglang-router-ip"),
    _Reason("refused", "use --request-timeout", one="sglang-router-request-timeout-secs"),
    _Reason("refused", "use --port-range", many="session-server-port"),
    _Reason("refused", "set http_proxy and no_proxy in the environment, which reach every process", one="http-proxy"),
    _Reason("noted", "batches go through Ray's object store", one="rollout-data-transport", only=("object-store",)),
    _Reason("noted", "batches go through Ray's object store", one="object-store-backend", only=("ray",)),
    _Reason("refused", "batches go through Ray's object store: remove it",
            one="mooncake-store-init-kwargs mooncake-replica-num"),
    _Reason("noted", _ALWAYS_WATCHED, one="rollout-health-check-interval rollout-health-check-timeout "
            "rollout-health-check-first-wait control-server-port mini-ft-controller-poll-interval "
            "mini-ft-controller-resume-delay", switches="mini-ft-controller-enable", many="ft-components"),
    # Model.
    _Reason("noted", "Megatron-Bridge pads the vocabulary of config.json", one="padded-vocab-size"),
    _Reason("noted", "model_type of config.json names the family", one="model-name"),
    _Reason("refused", "layers come from Megatron-Bridge, by the model_type of config.json: remove it",
            one="custom-model-provider-path"),
    _Reason("refused", _FAMILY, one="qwen-gdn-backend linear-attention-backend miles-dsa-topk-backend "
            "dsa-attention-backend",
            switches="freeze-indexer allgather-cp use-indexer-replay use-rollout-indexer-replay use-gated-attention "
            "apply-layernorm-1p"),
    _Reason("refused", "all weights are trained, or adapters alone: use --lora-rank and --target-modules",
            many="only-train-params-name-list freeze-params-name-list"),
    _Reason("refused", "training in 8 or 4 bits is not implemented: use --bf16", many="extra-high-precision-layers-hf "
            "extra-high-precision-layers-megatron megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules "
            "megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules"),
    _Reason("refused", "the critic has flags of its own: use --critic-hf-checkpoint, --critic-lr",
            one="megatron-config-path"),
    _Reason("refused", "use --ref-hf-checkpoint, a Hugging Face directory", one="ref-ckpt-step"),
    _Reason("refused", "models that read images are not trained: remove it", one="multimodal-keys"),
    _Reason("refused", "put the template into chat_template.jinja of --hf-checkpoint, which engines and trainer share",
            one="chat-template-path"),
    _Reason("noted", "samples are packed", one="qkv-format", only=("thd",)),
    _Reason("noted", "samples are packed", one="data-pad-size-multiplier"),
    # Publication.
    _Reason("noted", "for changes alone use --weight-delta with --weight-transport disk or object_store",
            one="update-weight-mode", only=("full",)),
    _Reason("noted", "for files use --weight-transport disk", one="update-weight-transport", only=("nccl",)),
    _Reason("noted", "for files use --weight-transport disk, for changes alone --weight-delta, too",
            one="update-weight-transfer-mode", only=("broadcast",)),
    _Reason("refused", "use --weight-delta", one="update-weight-delta-encoding"),
    _Reason("noted", "digests of all tensors are compared: --verify-weights", one="update-weight-delta-checksum"),
    _Reason("refused", "engines hold no files of weights: remove it", one="update-weight-local-checkpoint-dir"),
    _Reason("refused", "staged files are removed once engines have them: use --save-hf to keep weights",
            switches="update-weight-disk-keep-files"),
    _Reason("refused", "use --weight-transport module:attr", one="custom-update-weight-post-write-path "
            "p2p-transfer-num-workers p2p-transfer-timeout"),
    _Reason("noted", "every publication is compared: --verify-weights", switches="check-weight-update-equal"),
    _Reason("refused", "every publication is compared: use --verify-weights, --verify-weights-skip",
            one="check-weight-update-selector", many="check-weight-update-skip-list",
            switches="check-weight-update-allow-quant-error"),
    # Prompts and rollouts.
    _Reason("refused", "prompts come from --prompt-data: write them to a file first", one="data-source-path",
            switches="disable-rollout-global-dataset"),
    _Reason("refused", "a run that resumes (--load) knows its step: remove it", one="start-rollout-id"),
    _Reason("refused", "use --rollout-max-prompt-len and --rollout-max-response-len, which add up to it",
            one="rollout-max-context-len"),
    _Reason("noted", "samples keep the tokens as they were sampled; their text lacks only special tokens that bound it",
            switches="rollout-skip-special-tokens"),
    _Reason("refused", "use --max-token-age: it masks tokens of older weights",
            switches="mask-offpolicy-in-partial-rollout"),
    _Reason("refused", "use --custom-generate-function-path, which makes the sample", one="rollout-sample-hook-path"),
    _Reason("refused", "use --group-filter-path (groups to replace) and --batch-order",
            one="buffer-filter-path rollout-sample-filter-path rollout-all-samples-process-path "
            "custom-async-data-buffer-path"),
    _Reason("refused", "use --advantage-estimator module:attr (from groups of samples) or --token-advantages "
            "module:attr",
            one="rollout-data-postprocess-path custom-reward-post-process-path "
            "custom-convert-samples-to-train-data-path",
            switches="group-rm"),
    _Reason("refused", "use --custom-rm-path module:attr: a reward is a number", one="reward-key eval-reward-key"),
    _Reason("noted", "generation never waits for the trainer, but with --on-policy", switches="fully-async"),
    _Reason("refused", "use --rollout-concurrency-per-engine (samples in flight) and --max-rollout-lead (batches "
            "ahead)",
            one="rollout-submission-granularity async-max-concurrent-samples async-data-buffer-capacity-factor"),
    _Reason("refused", "use --stale-group-action: recycle is retry, drop is drop", one="async-unused-samples-handler"),
    _Reason("refused", "trajectories come from --environment-path, --agent-path or --agent-command",
            one="rollout-buffer-url fetch-trajectory-retry-times min-batch-collection-ratio rollout-task-type"),
    _Reason("refused", "each engine does prefill and decoding: remove it", one="prefill-num-servers"),
    _Reason("refused", "use --server-groups for engines that differ, and --sglang-X for SGLang's own flags",
            one="sglang-config"),
    _Reason("noted", "smg is the router", switches="use-miles-router", one="miles-router-timeout "
            "miles-router-max-connections miles-router-health-check-failure-threshold"),
    _Reason("noted", "agents have a session server: --agent-path, --agent-command", many="use-session-server"),
    _Reason("noted", "turns of a conversation are the tokens that were sampled", one="tito-model"),
    _Reason("refused", "sessions are trained as they were: remove it, docs/agents.md says how",
            one="session-message-matcher session-sample-picker-path session-sample-postprocessor-path"),
    # Evaluation.
    _Reason("noted", "the first and the last weights are always evaluated", switches="skip-eval-before-train"),
    _Reason("refused", "held-out prompts are answered as in training: use --custom-generate-function-path and "
            "--custom-rm-path", one="eval-function-path"),
    _Reason("refused", "use --eval-max-response-len: held-out prompts may be as long as the model allows",
            one="eval-max-prompt-len eval-max-context-len"),
    _Reason("refused", "an answer ends where the model ends it: remove it", one="eval-min-new-tokens"),
    _Reason("refused", _EVALUATION, one="eval-num-gpus eval-num-gpus-per-engine eval-hf-dir eval-max-in-flight "
            "eval-overflow-policy eval-keep-snapshots"),
    # Batches and loss.
    _Reason("noted", "tokens are balanced over data-parallel ranks", switches="balance-by-flops"),
    _Reason("noted", "log-probs come in chunks, --logprob-chunk, of micro-batches of --max-tokens-per-gpu",
            one="log-probs-max-tokens-per-gpu log-probs-chunk-size", switches="recompute-loss-function"),
    _Reason("refused", "batches are always full: choose --global-batch-size that divides them",
            switches="allow-partial-train-step use-dynamic-global-batch-size disable-rollout-trim-samples"),
    _Reason("noted", "checkpoints hold all that a run resumes with; --save-hf exports weights alone",
            switches="no-save-optim"),
    _Reason("refused", "use --save-interval", one="save-trigger-sentinel"),
    _Reason("refused", "use --kl-loss-type module:attr", switches="use-unbiased-kl"),
    _Reason("refused", "use --advantage-estimator reinforce: its advantage is the reward",
            switches="disable-rewards-normalization"),
    _Reason("noted", "trainer and engines are always compared", switches="get-mismatch-metrics"),
    _Reason("refused", "AdamW keeps its state: remove it", switches="reset-optimizer-states use-stateless-adam"),
    _Reason("refused", "use --on-policy, or --use-rollout-logprobs: log-probs of trainer and engines differ by "
            "rounding",
            switches="true-on-policy-mode recompute-logprobs-via-prefill"),
    _Reason("refused", "use --use-rollout-logprobs, without which the old log-probs need that pass",
            switches="skip-actor-forward-only"),
    _Reason("refused", "--use-opd compares sampled tokens with one teacher: remove it", one="opd-log-prob-top-k "
            "opd-top-k-strategy opd-reward-weight-mode opd-teacher-key", switches="opd-topk-per-position",
            many="opd-teacher-urls"),
    _Reason("refused", "the trainer calls no hook there: remove it", one="custom-megatron-init-path "
            "custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path "
            "custom-megatron-post-save-hook-path"),
    # Adapters.
    _Reason("noted", "adapters are published merged into the weights", switches="no-sglang-lora-use-virtual-experts"),
    _Reason("refused", "adapters are always published: remove it", switches="lora-train-only"),
    _Reason("refused", _ONE_ADAPTER, many="multi-lora-adapter", switches="multi-lora-disable-service-mode",
            one="multi-lora-idle-poll-s multi-lora-http-server-path multi-lora-backend-path multi-lora-api-port "
            "multi-lora-max-adapter-global-batch-size multi-lora-max-coalesce-wait-s multi-lora-max-empty-wait-s"),
    # Around a run.
    _Reason("noted", _CHANGES_METRICS, one="log-reward-category mfu-peak-tflops",
            switches="log-multi-turn log-passrate "
            "log-correct-samples wandb-always-use-train-step"),
    _Reason("noted", "--log-entropy computes and logs it", switches="use-rollout-entropy"),
    _Reason("noted", "files are in --run-dir, whose name is the run's", one="wandb-dir",
            switches="disable-wandb-random-suffix"),
    _Reason("refused", "set WANDB_BASE_URL in the environment", one="wandb-host"),
    _Reason("refused", "set WANDB_ENTITY in the environment", one="wandb-team"),
    _Reason("refused", "a run that resumes goes on with its W&B run by itself: remove it", one="wandb-run-id"),
    _Reason("refused", "use --custom-tracker-path module:attr; metrics.jsonl has every metric",
            switches="use-tensorboard use-mlflow use-prometheus", one="tb-project-name tb-experiment-name "
            "mlflow-tracking-uri mlflow-experiment-name mlflow-run-name mlflow-run-id prometheus-port "
            "prometheus-run-name custom-rollout-log-function-path custom-eval-rollout-log-function-path"),
    _Reason("refused", "use --load-debug-rollout-data",
            one="load-forge-rollout-data load-debug-rollout-data-subsample"),
    _Reason("refused", "use --save-debug-rollout-data",
            one="save-debug-train-data save-debug-trajectory-data save-debug-event-data"),
    _Reason("refused", "use --debug-rollout-only or --debug-train-only",
            switches="debug-skip-weight-update debug-disable-optimizer"),
    _Reason("refused", "use --num-rollout", one="debug-exit-after-rollout"),
    _Reason("refused", "PyTorch's profiler is not part of a run: remove it", one="memory-snapshot-dir "
            "memory-snapshot-num-steps memory-recorder", many="profile-target", switches="record-memory-history"),
    _Reason("refused", _DEBUGGING, one="dumper-dir dumper-source-patcher-config-inference "
            "dumper-source-patcher-config-train witness-buffer-size env-report",
            many="dumper-inference dumper-fwd-only "
            "dumper-fwd-bwd", switches="dumper-enable enable-witness enable-event-analyzer save-local-weight-checksum "
            "debug-deterministic-collective"),
    _Reason("refused", _TESTS, one="ci-train-rollout-logprob-abs-diff-threshold ci-save-grad-norm ci-load-grad-norm "
            "ci-ft-test-actions ci-inject-rollout-data-path ci-inject-rollout-data-start-rollout-id "
            "ci-inject-rollout-data-min-match-ratio ci-metric-checker-key ci-metric-checker-threshold",
            switches="ci-disable-logprobs-checker ci-disable-weight-update-checker ci-save-model-hash "
            "ci-check-model-hash"),
    # Megatron's, which their scripts give.
    _Reason("refused", "use --lr-warmup-iters (optimizer steps)", one="lr-warmup-fraction"),
    _Reason("refused", "gradients that are not finite are always rejected: use --bad-step-action to choose what "
            "follows",
            switches="no-check-for-nan-in-loss-and-grad"),
)  # fmt: skip

SLIME: tuple[ForeignFlag, ...] = (
    *(row for reason in _REASONS for row in reason.rows()),
    _works("--disable-grpo-std-normalization", "--no-grpo-std-normalization", takes="nothing"),
    _works("--rollout-external-engine-addrs", "--rollout-external", takes="many"),
    _works("--update-weight-disk-dir", "--weight-staging-dir"),
    _works("--observe-training-entropy", "--log-entropy", takes="nothing"),
    _held_out("--eval-input-key", "input_key"),
    _held_out("--eval-label-key", "label_key"),
    _held_out("--eval-tool-key", "tool_key"),
)

"""Rollouts: what is generated, and how much."""

from __future__ import annotations

from dataclasses import dataclass

from miles_async.arguments.flag import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutArguments:
    """Rollout"""

    num_rollout: int = flag(
        1, "rollout steps to train: batches cut, trained on and (by interval) published", at_least=1
    )
    num_epoch: int | None = flag(
        None,
        "passes over --prompt-data, in place of --num-rollout: rollout steps = epochs × rows ÷ --rollout-batch-size, "
        "counted when the run starts",
        at_least=1,
    )
    rollout_batch_size: int = flag(32, "prompts per rollout step", at_least=1, at_most=1_000_000)
    n_samples_per_prompt: int = flag(8, "samples of each prompt, compared with each other", at_least=1, at_most=100_000)
    extra_samples_per_prompt: int = flag(
        0,
        "samples started beyond --n-samples-per-prompt: a group is complete once enough of them are finished, and the "
        "slowest are stopped; saves the wait for stragglers and favours short responses (see rollout/length_bias)",
        at_least=0,
        at_most=100_000,
    )
    rollout_max_response_len: int = flag(1024, "tokens a response may have", at_least=1)
    rollout_temperature: float = flag(1.0, "sampling temperature; the trainer's log-probs use it too", above=0)
    rollout_top_p: float = flag(
        1.0, "only 1: engines report log-probs of the distribution before nucleus sampling (evaluation: --eval-top-p)"
    )
    rollout_top_k: int = flag(
        -1, "only -1: engines report log-probs of the distribution before its tail is cut (evaluation: --eval-top-k)"
    )
    rollout_stop: tuple[str, ...] = flag((), "strings that end a response")
    rollout_concurrency_per_engine: int = flag(
        256,
        "samples in flight at once per serving engine; with --adaptive-rollout-concurrency an upper limit",
        at_least=1,
    )
    adaptive_rollout_concurrency: bool = flag(
        False,
        "adapt the number of samples in flight during the run: fewer while engines queue requests or fill their KV "
        "cache, more otherwise",
    )
    rollout_kv_use_target: float = flag(
        0.9,
        "used fraction of an engine's KV cache above which --adaptive-rollout-concurrency sends fewer samples",
        metavar="FRACTION",
        needs=("adaptive_rollout_concurrency",),
        above=0,
        at_most=1,
    )
    custom_generate_function_path: str | None = flag(None, "module:attr of your own Generate", metavar="MODULE:ATTR")
    max_sample_failures: int = flag(
        8, "infrastructure failures that one sample survives before its attempt fails", at_least=0
    )
    service_outage_timeout: float = flag(
        600.0,
        "seconds a service of rewards, environments or agents may be down before the run ends; its work waits",
        metavar="SECONDS",
        above=0,
    )
    max_prompt_attempts: int = flag(
        4,
        "attempts per prompt, counted separately by cause: then it is quarantined if it failed by its own fault, or "
        "replaced by a fresh prompt if engines failed or it was stale",
        at_least=1,
    )
    max_quarantined_prompts: int = flag(
        100, "maximum number of quarantined prompts; the run stops beyond it", at_least=0
    )

    @property
    def samples_per_rollout(self) -> int:
        """Samples of one rollout step, when every group is whole."""
        return self.rollout_batch_size * self.n_samples_per_prompt

"""Publication of weights to the engines (C8)."""

from __future__ import annotations

from dataclasses import dataclass

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsArguments:
    """Weights"""

    update_weights_interval: int = flag(1, "rollout steps between publications")
    pause_generation_mode: str = flag(
        "retract",
        "what happens to requests in flight: abort returns their partial output (the rest continues under "
        "the new "
        "version), retract drops and rebuilds their KV cache, in_place keeps it",
        choices=("abort", "retract", "in_place"),
    )
    update_weight_buffer_size: int = flag(512 * 1024**2, "bytes per bucket of exported weights", metavar="BYTES")
    verify_weights: str = flag(
        "canary",
        "after each publication compare every engine's log-probs of a fixed sequence with the trainer's",
        choices=("off", "canary"),
    )
    canary_tolerance: float | None = flag(
        None, "largest log-prob difference the canary accepts (default: 1e-3 in fp32, 0.15 in bf16)"
    )
    publication_timeout: float = flag(300.0, "seconds one publication may take", metavar="SECONDS")
    debug_publication_lag: int = flag(
        0, "debug: send the weights of this many versions ago, to study staleness", metavar="VERSIONS"
    )

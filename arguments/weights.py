"""Publication of weights to the engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag

PauseMode = Literal["abort", "retract", "in_place"]
PublishOrder = Literal["all", "rolling"]
DeltaEncoding = Literal["xor", "overwrite"]
Quantization = Literal["none", "fp8"]
VerifyMode = Literal["full", "sample", "canary", "off"]

_CANARY = ("verify_weights=full", "verify_weights=sample", "verify_weights=canary")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsArguments:
    """Weights"""

    update_weights_interval: int = flag(1, "rollout steps between publications", at_least=1)
    pause_generation_mode: PauseMode = flag(
        "retract",
        "action for requests in flight. abort: return their partial output (see --keep-aborted); retract: drop and "
        "rebuild their KV cache; in_place: keep it",
    )
    keep_aborted: bool = flag(
        True,
        "with --pause-generation-mode abort: keep partial output and continue it under the new version; otherwise "
        "generate again, so that no sample mixes versions",
        needs=("pause_generation_mode=abort",),
    )
    publish_order: PublishOrder = flag(
        "all",
        "all: pause all engines together, which takes the least time; rolling: update --rolling-engines at a time "
        "while the others generate, which takes longer and never stops the fleet",
    )
    rolling_engines: int = flag(
        1, "with --publish-order rolling: engines updated at a time", needs=("publish_order=rolling",), at_least=1
    )
    update_weight_buffer_size: int = flag(
        512 * 1024**2, "bytes per bucket of exported weights", metavar="BYTES", at_least=1
    )
    weight_transport: str = flag(
        "distributed",
        "how weights reach engines. distributed: broadcast over process groups; disk: engines load the staged files; "
        "object_store: Ray brings the files to each engine's node; ipc: the sending rank shares its GPU's memory with "
        "engines on that GPU; or module:attr, a TransportSpec of your own",
        metavar="{distributed,disk,object_store,ipc}|module:attr",
    )
    weight_delta: Literal["off"] | DeltaEncoding = flag(
        "off",
        "with --weight-transport disk or object_store: send only changes to engines that hold the previous version, "
        "compressed. xor: of the bits; overwrite: which elements, and their values",
    )
    weight_staging_dir: Path | None = flag(
        None,
        "where the trainer writes exported weights, up to three versions of them (default: /dev/shm if they fit into "
        "half of the free memory, else TMPDIR, unless that is a network disk); with --weight-transport disk, a place "
        "that every engine's node sees",
    )
    rollout_quantization: Quantization = flag(
        "none",
        "form of the weights that engines generate with. fp8: matrices of attention, MLP and experts are quantized as "
        "they are published, in blocks of 128 x 128, which halves engines' memory and what is sent; training, "
        "--save and --save-hf stay as they are",
    )
    verify_weights: VerifyMode = flag(
        "full",
        "checks after each publication, on every engine. full: compare digests of every tensor that it holds with "
        "the sent tensors', and log-probs of a text (the canary) with the trainer's; sample: compare one of "
        "--verify-weights-shares of the tensors each time, and the canary; canary: compare log-probs alone; off: "
        "only check that engines report the version",
    )
    verify_weights_shares: int = flag(
        8,
        "with --verify-weights sample: number of shares; every tensor is compared once in this many publications",
        metavar="N",
        needs=("verify_weights=sample",),
        at_least=1,
    )
    verify_weights_skip: tuple[str, ...] = flag(
        (),
        "with --verify-weights full or sample: do not compare tensors whose names contain one of these, as sent or as "
        "the engine's model has them",
        metavar="PART",
    )
    canary_tolerance: float | None = flag(
        None,
        "largest mean difference of log-probs that the canary accepts; at the 90 % quantile it accepts four times as "
        "much (default: 0.25 in bf16; in fp32 1e-3 on CPUs, 0.03125 on GPUs; 0.75 with --rollout-quantization fp8)",
        needs=_CANARY,
        above=0,
    )
    canary_length: int = flag(
        256, "tokens of the canary; at most half of the context and one micro-batch", needs=_CANARY, at_least=2
    )
    publication_timeout: float = flag(
        300.0, "seconds one publication may take (rolling: of one batch of engines)", metavar="SECONDS", above=0
    )
    debug_publication_lag: int = flag(
        0, "debug: send the weights of this many versions ago, to study staleness", metavar="VERSIONS", at_least=0
    )

    @property
    def delta_encoding(self) -> DeltaEncoding | None:
        """Encoding of changes; None if whole tensors are sent."""
        return None if self.weight_delta == "off" else self.weight_delta

    @property
    def compares_digests(self) -> bool:
        """True if engines report what they hold."""
        return self.verify_weights in ("full", "sample")

    @property
    def step_timeout(self) -> float:
        """Seconds that one call to an engine, or one bucket, may take in a publication. One that hangs costs two of
        these at most, which leaves time for the others.
        """
        return self.publication_timeout / 6

    @property
    def group_timeout(self) -> float:
        """Seconds that members of a process group wait for each other. Less than a call may take, so that members
        waiting for a hanging one report it, and only that one gives no answer.
        """
        return 0.8 * self.step_timeout

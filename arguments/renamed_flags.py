"""Flags that users of other systems or versions type, and what to use here: they never fail silently."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

RENAMED_FLAGS = {
    "--max-async-level": "it was two things: use --max-weight-staleness (oldest age that is trained) and "
    "--max-rollout-lead (batches admitted ahead of the trainer)",
    "--max-off-policy-steps": "use --max-weight-staleness",
    "--staleness-threshold": "use --max-weight-staleness",
    "--async-steps": "use --max-rollout-lead (batches ahead) and --max-weight-staleness (age)",
    "--trigger-parameter-sync-step": "use --update-weights-interval",
    "--colocate": "trainer and engines run at the same time and never share devices: "
    "use --actor-num-gpus-per-node and --rollout-num-gpus",
    "--offload": "nothing is offloaded, since trainer and engines never share devices: remove it",
    "--offload-train": "nothing is offloaded, since trainer and engines never share devices: remove it",
    "--offload-rollout": "nothing is offloaded, since trainer and engines never share devices: remove it",
    "--use-dynamic-batch-size": "samples are always packed: remove it; --max-tokens-per-gpu is the size of "
    "a micro-batch",
    "--micro-batch-size": "samples are always packed: --max-tokens-per-gpu is the size of a micro-batch",
    "--rollout-function-path": "the loop is not replaceable: use --custom-generate-function-path for one "
    "trajectory, "
    "--custom-rm-path for the reward, --group-filter and --group-filter-path for what is trained",
    "--dynamic-sampling-filter-path": "use --group-filter zero_variance, or your own filter with --group-filter-path",
    "--partial-rollout": "generation always survives publications: remove it; --pause-generation-mode says how",
    "--num-epoch": "use --num-rollout (rollout steps)",
    "--train-iters": "use --num-rollout (rollout steps)",
    "--actor-num-gpus": "use --actor-num-nodes and --actor-num-gpus-per-node",
    "--rollout-num-engines": "use --rollout-num-gpus and --rollout-num-gpus-per-engine",
    "--ref-load": "use --ref-hf-checkpoint",
    "--kl-coef": "use --use-kl-loss and --kl-loss-coef",
    "--wandb-key": "set WANDB_API_KEY in the environment",
    "--tokenizer-path": "the tokenizer comes with --hf-checkpoint",
}
"""Flag → what to do instead."""

OWNED_PASS_THROUGH_FLAGS = {
    "--sglang-model-path": "use --hf-checkpoint",
    "--sglang-tokenizer-path": "the tokenizer comes with --hf-checkpoint",
    "--sglang-tp": "use --rollout-num-gpus-per-engine",
    "--sglang-tp-size": "use --rollout-num-gpus-per-engine",
    "--sglang-tensor-parallel-size": "use --rollout-num-gpus-per-engine",
    "--sglang-host": "addresses of engines are chosen by the run: remove it",
    "--sglang-port": "ports of engines are chosen by the run: remove it",
    "--sglang-weight-version": "versions are counted by the run: remove it",
    "--router-policy": "use --sglang-router-policy",
    "--router-port": "use --sglang-router-port",
    "--router-host": "the address of the router is chosen by the run: remove it",
    "--router-worker-urls": "engines are registered by the run: remove it",
}
"""``--sglang-*`` and ``--router-*`` flags that the run itself decides → what to do instead."""


def explain_unknown(name: str, valid: Iterable[str]) -> str:
    """What is wrong with a flag (or key of a file) that does not exist, and the nearest one that does.

    >>> explain_unknown("--max-weight-stalenes", ["--max-weight-staleness", "--lr"])
    'unknown flag --max-weight-stalenes; did you mean --max-weight-staleness?'
    """
    advice = RENAMED_FLAGS.get(name) or OWNED_PASS_THROUGH_FLAGS.get(name)
    if advice:
        return f"{name} does not exist here: {advice}"
    normalized = "--" + name.lstrip("-").replace("_", "-").lower()
    is_for_router = name.startswith("--sglang-router-")
    nearest = difflib.get_close_matches(normalized, list(valid), n=1, cutoff=0.9 if is_for_router else 0.6)
    if is_for_router and not nearest:
        return f"unknown flag {name}; arguments of the router are passed as --router-{name[16:]}"
    hint = f"did you mean {nearest[0]}?" if nearest else "`miles-async train --help` lists the flags"
    return f"unknown flag {name}; {hint}"

"""Flags of other systems and earlier versions, each with what to use here. None is ignored silently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches

_CLOSE_NAME = 0.8  # similarity of a misspelt name; unrelated flags of equal length have 0.4 to 0.7
_CLOSE_WORD = 0.85
_SUGGESTIONS = 3

RENAMED_FLAGS = {
    "--max-async-level": "it meant two things: use --max-weight-staleness (oldest age that is trained) and "
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
    "--rollout-function-path": "the loop is not replaceable: use --custom-generate-function-path for one trajectory, "
    "--custom-rm-path for the reward, --group-filter and --group-filter-path to choose what is trained",
    "--dynamic-sampling-filter-path": "use --group-filter zero_variance, or your own filter with --group-filter-path",
    "--partial-rollout": "generation always continues across publications: remove it; --pause-generation-mode says how",
    "--num-epoch": "use --num-rollout (rollout steps)",
    "--train-iters": "use --num-rollout (rollout steps)",
    "--actor-num-gpus": "use --actor-num-nodes and --actor-num-gpus-per-node",
    "--rollout-num-engines": "use --rollout-num-gpus and --rollout-num-gpus-per-engine",
    "--ref-load": "use --ref-hf-checkpoint",
    "--custom-advantage-function-path": "use --advantage-estimator module:attr (from groups of samples) or "
    "--token-advantages module:attr (on the trainer)",
    "--custom-loss-function-path": "use --policy-loss module:attr",
    "--custom-pg-loss-reducer-function-path": "use --loss-aggregation module:attr",
    "--custom-tis-function-path": "use --use-tis and --tis-mode module:attr",
    "--loss-type": "use --policy-loss",
    "--calculate-per-token-loss": "it is the default: remove it; --loss-aggregation has the alternatives",
    "--wandb-key": "set WANDB_API_KEY in the environment",
    "--learning-rate": "use --lr",
    "--tokenizer-path": "the tokenizer comes with --hf-checkpoint",
}
"""Flag → what to do instead."""

KEY_ADVICE = (
    "every run makes keys of its own, and keys on a command line can be seen by everybody: to choose them, set "
    "MILES_ASYNC_API_KEY and MILES_ASYNC_ADMIN_KEY in the environment"
)

OWNED_PASS_THROUGH_FLAGS = {
    "--sglang-model-path": "use --hf-checkpoint",
    "--sglang-tokenizer-path": "the tokenizer comes with --hf-checkpoint",
    "--sglang-tp": "use --rollout-num-gpus-per-engine",
    "--sglang-tp-size": "use --rollout-num-gpus-per-engine",
    "--sglang-tensor-parallel-size": "use --rollout-num-gpus-per-engine",
    "--sglang-host": "addresses of engines are chosen by the run: remove it",
    "--sglang-port": "ports of engines are chosen by the run: remove it",
    "--sglang-preferred-sampling-params": "the trainer's log-probs assume the run's own sampling parameters: use "
    "--rollout-temperature",
    "--sglang-weight-version": "versions are counted by the run: remove it",
    "--sglang-api-key": KEY_ADVICE,
    "--sglang-admin-api-key": KEY_ADVICE,
    "--router-api-key": KEY_ADVICE,
    "--router-tenant-api-key": KEY_ADVICE,
    "--router-control-plane-api-keys": KEY_ADVICE,
    "--router-policy": "use --sglang-router-policy",
    "--router-port": "use --sglang-router-port",
    "--router-host": "the address of the router is chosen by the run: remove it",
    "--router-worker-urls": "engines are registered by the run: remove it",
}
"""``--sglang-*`` and ``--router-*`` flags that the run itself decides → what to do instead."""


def explain_unknown(name: str, valid: Sequence[str]) -> str:
    """Explain that a flag (or key of a file) does not exist, and suggest flags of similar spelling or with its words.

    >>> explain_unknown("--max-weight-stalenes", ["--max-weight-staleness", "--lr"])
    'unknown flag --max-weight-stalenes; did you mean --max-weight-staleness?'
    """
    advice = RENAMED_FLAGS.get(name) or OWNED_PASS_THROUGH_FLAGS.get(name)
    if advice:
        return f"{name} does not exist here: {advice}"
    is_for_router = name.startswith("--sglang-router-")
    words = _words(name)
    nearest = _most_similar(words, [*valid, *RENAMED_FLAGS], _is_close)
    if not nearest and is_for_router:
        return f"unknown flag {name}; arguments of the router are passed as --router-{name[16:]}"
    if nearest and nearest[0] in RENAMED_FLAGS:
        return f"unknown flag {name}; {nearest[0]} does not exist here either: {RENAMED_FLAGS[nearest[0]]}"
    meant = [*nearest[:1], *_most_similar(words, valid, _are_among)] or _most_similar(words, valid, _hold_all)
    meant = list(dict.fromkeys(meant))[:_SUGGESTIONS]
    if not meant:
        return f"unknown flag {name}; `miles-async train --help` lists the flags"
    return f"unknown flag {name}; did you mean {' or '.join(meant)}?"


def _words(name: str) -> list[str]:
    return name.lstrip("-").replace("_", "-").lower().split("-")


def _most_similar(words: Sequence[str], flags: Iterable[str], fits: Callable[..., bool]) -> list[str]:
    """Flags that fit ``words``, most similar first."""
    found = [flag for flag in flags if fits(words, _words(flag))]
    return sorted(found, key=lambda flag: -_similarity(words, _words(flag)))


def _is_close(words: Sequence[str], others: Sequence[str]) -> bool:
    return _similarity(words, others) >= _CLOSE_NAME


def _are_among(words: Sequence[str], others: Sequence[str]) -> bool:
    """True if each word is one of the others, or a misspelling of it."""
    return all(get_close_matches(word, others, n=1, cutoff=_CLOSE_WORD) for word in words)


def _hold_all(words: Sequence[str], others: Sequence[str]) -> bool:
    return _are_among(others, words)


def _similarity(words: Sequence[str], others: Sequence[str]) -> float:
    return SequenceMatcher(None, "-".join(words), "-".join(others)).ratio()

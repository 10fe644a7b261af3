"""The corrections that the study compares, with their flags.

Settings are the published ones where there are any (``@preset:``), else the default of the flag. Every correction
averages over tokens, so that it differs from the others in its weights alone.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAINER_RATIO = ("--no-use-rollout-logprobs",)  # π / π_old, which is 1 where a batch has one optimizer step
ENGINE_RATIO = ("--use-rollout-logprobs",)  # π / π_rollout
TOKEN_MEAN = ("--loss-aggregation", "token_mean")


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """One row of the table.

    On data of age 0 every correction here leaves the gradient as it is (a test compares them), so that one run without
    correction stands there for all that have its learning rate.
    """

    name: str
    title: str
    flags: tuple[str, ...]
    own_learning_rate: bool = False  # then data of age 0 has a cell of its own, too


UNCORRECTED = Correction(name="none", title="no correction", flags=(*TRAINER_RATIO, "--allow-uncorrected-off-policy"))
SMALL_STEPS = Correction(
    name="small-lr",
    title="control: no correction, learning rate 1e-4",
    flags=(*UNCORRECTED.flags, "--lr", "1e-4"),
    own_learning_rate=True,
)
CORRECTIONS = (
    UNCORRECTED,
    SMALL_STEPS,
    Correction(name="tis-token", title="TIS, token", flags=(*TRAINER_RATIO, "--use-tis")),
    Correction(
        name="tis-sequence",
        title="TIS, sequence",
        flags=(*TRAINER_RATIO, "--use-tis", "--tis-level", "sequence"),
    ),
    Correction(
        name="tis-geometric",
        title="TIS, geometric mean",
        flags=(*TRAINER_RATIO, "--use-tis", "--tis-level", "geometric"),
    ),
    Correction(name="icepop", title="IcePop", flags=(*TRAINER_RATIO, "@preset:icepop")),
    Correction(
        name="rejection-k3",
        title="TIS, token, and rejection by k3",
        flags=(
            *(*TRAINER_RATIO, "--use-tis", "--use-rs", "--rs-statistic", "k3"),
            *("--rs-level", "geometric", "--rs-upper-bound", "0.05"),
        ),
    ),
    Correction(name="m2po", title="M2PO", flags=(*TRAINER_RATIO, "@preset:m2po", "--eps-clip-high", "1e9")),
    Correction(name="a-3po", title="A-3PO", flags=(*TRAINER_RATIO, "@preset:a-3po")),
    Correction(
        name="ess-lr",
        title="TIS, token, and VCPO's learning rate",
        flags=(*TRAINER_RATIO, "--use-tis", "--ess-lr-scaling", "sqrt"),
    ),
    Correction(
        name="age-decay",
        title="weight 0.9^age",
        flags=(*UNCORRECTED.flags, "--token-age-decay", "0.9"),
    ),
    Correction(name="ppo-ratio", title="PPO ratio to the engines", flags=ENGINE_RATIO),
    Correction(name="opsm", title="PPO ratio and OPSM", flags=(*ENGINE_RATIO, "--use-opsm")),
    Correction(name="gspo", title="GSPO", flags=(*ENGINE_RATIO, "@preset:gspo", *TOKEN_MEAN)),
    Correction(name="cispo", title="CISPO", flags=(*ENGINE_RATIO, "@preset:cispo")),
    Correction(
        name="dppo",
        title="DPPO, total variation",
        flags=(
            *(*ENGINE_RATIO, "@preset:dppo", "--grpo-std-normalization"),
            *(*TOKEN_MEAN, "--loss-length-normalizer", "none"),
        ),
    ),
    Correction(
        name="sat",
        title="SAT",
        flags=(*ENGINE_RATIO, "@preset:sat", "--eps-clip-high", "0.2", "--no-use-kl-loss", "--kl-loss-coef", "0"),
    ),
    Correction(
        name="sao-clip",
        title="SAO's clip",  # with advantages of groups: SAO itself has a critic and one sample per prompt
        flags=(*ENGINE_RATIO, "--policy-loss", "dis", "--eps-clip", "0.3", "--eps-clip-high", "5"),
    ),
)
BY_NAME = {correction.name: correction for correction in CORRECTIONS}

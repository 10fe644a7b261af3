"""Values that slime and miles give to flags that are ours, too: what becomes of each."""

from __future__ import annotations

from miles_async.arguments.foreign.record import ForeignValue

VALUES: tuple[ForeignValue, ...] = (
    ForeignValue(
        flag="--rm-type", value="deepscaler", ours=("--rm-type", "math"),
        note="`math` compares the answer after the last </think>, and of a response without one the whole",
    ),
    ForeignValue(
        flag="--rm-type", value="gemma_math", ours=("--rm-type", "math"),
        note="it skips the thoughts of all models, up to <channel|> in Gemma 4",
    ),
    ForeignValue(
        flag="--rm-type", value="dapo", ours=("--rm-type", "math"), note="a wrong answer has 0, not -1",
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
        flag="--train-backend", value="fsdp", ours=("--train-backend", "megatron"), note="FSDP does not exist here"
    ),
)  # fmt: skip

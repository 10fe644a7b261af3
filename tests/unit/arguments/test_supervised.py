"""Supervised fine-tuning: the trainer alone, and flags of everything else are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from miles_async.arguments import validation
from miles_async.arguments.parser import assemble, parse_arguments
from miles_async.arguments.validation import validate
from miles_async.errors import ConfigurationError


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, object]:
    """The fewest flags."""
    model, prompts = tmp_path / "model", tmp_path / "train.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 4, "max_position_embeddings": 128}))
    save_file({}, model / "model.safetensors")
    prompts.write_text('{"prompt": "rev 12", "label": "21"}\n')
    return {"hf_checkpoint": model, "prompt_data": (str(prompts),), "loss_type": "sft_loss", "n_samples_per_prompt": 1}


def test_the_trainer_runs_alone_and_needs_no_reward(flags: dict[str, object]) -> None:
    arguments = assemble(flags, {})
    validate(arguments)
    assert arguments.sides == "trainer"
    assert assemble({}, {}).sides == "both"
    assert assemble({"debug_rollout_only": True}, {}).sides == "rollout"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_samples_per_prompt": 8}, "--n-samples-per-prompt 8: a row is one example; use 1"),
        ({"rollout_temperature": 0.5}, "--rollout-temperature 0.5, at which answers are learned"),
        ({"use_tis": True}, "--use-tis has no effect with --loss-type sft_loss"),
        ({"policy_loss": "gspo"}, "--policy-loss has no effect"),
        ({"use_opd": True}, "--use-opd has no effect"),
        ({"rm_type": "math"}, "--rm-type has no effect"),
        ({"eval_interval": 5}, "--eval-interval has no effect"),
        ({"max_weight_staleness": 2}, "--max-weight-staleness has no effect"),
        ({"debug_rollout_only": True}, "--debug-rollout-only has no effect"),
        ({"rollout_max_prompt_len": 5}, "--rollout-max-prompt-len has no effect"),
        ({"ess_lr_scaling": "sqrt"}, "--ess-lr-scaling weighs samples"),
        ({"max_logprob_diff": 1.0}, "--max-logprob-diff compares with engines"),
        ({"loss_aggregation": "sequence_sum"}, "--loss-length-normalizer: give it"),
        ({"rollout_batch_size": 3, "global_batch_size": 2}, "do not divide into optimizer steps"),
    ],
)
def test_flags_of_what_is_not_done_are_refused(
    change: dict[str, object], message: str, flags: dict[str, object]
) -> None:
    # covers: C12
    with pytest.raises(ConfigurationError) as caught:
        validate(assemble({**flags, **change}, {}))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share_prefixes": True, "device": "cuda"}, "--share-prefixes with --device cuda"),
        ({"lora_alpha": 4.0}, "--lora-alpha 4.0 has no effect"),
    ],
)
def test_layouts_are_checked_as_for_sampled_data(
    change: dict[str, object], message: str, flags: dict[str, object]
) -> None:
    # covers: C12
    with pytest.raises(ConfigurationError) as caught:
        validate(assemble({**flags, **change}, {}))
    assert message in str(caught.value)


def test_every_check_belongs_to_all_runs_or_to_one_kind_of_data() -> None:
    listed = [
        *(*validation.COMMON_CHECKS, *validation.SAMPLED_CHECKS),
        *(*validation.SUPERVISED_CHECKS, *validation.DIVIDING_CHECKS),
        *(check for check in validation.EVALUATED_CHECKS if check not in validation.SAMPLED_CHECKS),
    ]
    known = {name for name in vars(validation) if name.startswith("check_")}
    assert sorted(check.__name__ for check in listed) == sorted(known - {"check_foreign", "check_needs"})  # take more


def test_a_script_of_slime_is_read_as_it_is() -> None:
    # covers: P8
    parsed = parse_arguments(
        [
            *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--input-key", "messages"),
            *("--rollout-shuffle", "--rollout-batch-size", "128", "--global-batch-size", "128", "--loss-type"),
            *("sft_loss", "--calculate-per-token-loss", "--disable-compute-advantages-and-returns"),
            *("--debug-train-only", "--loss-mask-type", "qwen3", "--label-key", "none", "--num-rollout", "3"),
        ]
    )
    arguments = parsed.arguments
    assert arguments.algorithm.supervised
    assert (arguments.rollout.n_samples_per_prompt, arguments.rollout.rollout_batch_size) == (1, 128)
    assert arguments.sides == "trainer"
    with pytest.raises(ConfigurationError, match="use --policy-loss module:attr"):
        parse_arguments(["--loss-type", "custom_loss"])
    with pytest.raises(ConfigurationError, match="another loop cannot be put in"):
        parse_arguments(["--rollout-function-path", "my.loop"])

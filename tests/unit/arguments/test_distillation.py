"""On-policy distillation: the teacher that flags name, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from miles_async.arguments import Arguments, DebugArguments, RewardArguments
from miles_async.arguments.distillation_checks import check_distillation, vocabulary_difference
from miles_async.arguments.parser import assemble
from miles_async.arguments.reward_checks import check_group_filters, check_rewards
from miles_async.arguments.server_groups import teacher_group

Flags = dict[str, Any]

TRAIN = "[groups.train]\n"
FROZEN = '[groups.{name}]\nrole = "frozen"\nmodel = "{model}"\n'


def model(directory: Path, vocabulary: dict[str, int] | None = None, **config: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **config}))
    save_file({}, directory / "model.safetensors")
    if vocabulary is not None:
        added = [{"id": 90, "content": "<end>"}]
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return directory


@pytest.fixture
def flags(tmp_path: Path) -> Flags:
    """A student and a teacher that knows one token more."""
    student = model(tmp_path / "student", {"a": 0, "b": 1})
    teacher = model(tmp_path / "teacher", {"a": 0, "b": 1, "c": 2}, max_position_embeddings=4096)
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(TRAIN + FROZEN.format(name="wise", model=teacher))
    return {"hf_checkpoint": student, "server_groups": fleet, "use_opd": True, "rollout_max_response_len": 100}


def problems(flags: Flags, **changes: object) -> list[str]:
    return list(check_distillation(assemble({**flags, **changes}, {})))


def test_the_only_frozen_group_is_the_teacher(flags: Flags) -> None:
    assert problems(flags) == []
    assert teacher_group(assemble(flags, {})).name == "wise"


def test_a_teacher_is_named_where_there_are_several(flags: Flags) -> None:
    fleet = flags["server_groups"]
    fleet.write_text(fleet.read_text() + '[groups.judge]\nrole = "frozen"\n')
    (problem,) = problems(flags)
    assert 'expected a group with role = "frozen"' in problem
    assert "found wise, judge; name one with --opd-teacher" in problem
    assert problems(flags, opd_teacher="wise") == []
    assert "--opd-teacher owl: expected a group" in problems(flags, opd_teacher="owl")[0]


def test_a_teacher_that_is_absent_is_asked_for(flags: Flags) -> None:
    assert "found none; add one" in problems(flags, server_groups=None)[0]
    alone = DebugArguments(debug_train_only=True)
    assert list(check_distillation(replace(assemble({**flags, "server_groups": None}, {}), debug=alone))) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opd_kl_coef": 0.0}, "--opd-kl-coef 0 has no effect"),
        ({"rollout_temperature": 0.7}, "--rollout-temperature 0.7: the teacher's log-probs are at temperature 1"),
        ({"m2_threshold": 0.04, "use_tis": True}, "--m2-threshold leaves tokens out"),
        ({"policy_loss": "kl_cov"}, "--policy-loss kl_cov chooses tokens by advantages"),
        ({"rollout_max_response_len": 4096}, "4097 tokens, and 7 have to be left"),
        ({"use_opd": False, "advantage_estimator": "on_policy_distillation"}, "add --use-opd"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str, flags: Flags) -> None:
    # covers: C12
    (problem,) = problems(flags, **changes)
    assert message in problem


def test_an_own_loss_may_have_another_use_for_a_teacher(flags: Flags) -> None:
    assert problems(flags, opd_kl_coef=0.0, policy_loss="my:loss") == []


def test_a_teacher_has_the_student_s_tokens(flags: Flags, tmp_path: Path) -> None:
    # covers: C12
    student, same = flags["hf_checkpoint"], tmp_path / "teacher"
    assert vocabulary_difference(student, same) is None
    assert "expected id 2 for 'c'" in str(vocabulary_difference(same, student))
    other = model(tmp_path / "other", {"b": 0, "a": 1})
    flags["server_groups"].write_text(TRAIN + FROZEN.format(name="odd", model=other))
    (problem,) = problems(flags)
    assert "[groups.odd]: the student's tokens are not the teacher's: expected id 0 for 'a'" in problem
    assert "found id 1; choose a teacher with the same tokenizer" in problem


def test_tokenizers_of_other_files_are_the_same_or_not(tmp_path: Path) -> None:
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    assert "to compare, found none" in str(vocabulary_difference(one, other))
    for directory, content in ((one, b"x"), (other, b"x")):
        (directory / "tokenizer.model").write_bytes(content)
    assert vocabulary_difference(one, other) is None
    (other / "tokenizer.model").write_bytes(b"y")
    assert "tokenizer.model differs" in str(vocabulary_difference(one, other))


def test_tokens_of_a_unigram_model_have_their_position_as_id(tmp_path: Path) -> None:
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    for directory, words in ((one, ["a", "b"]), (other, ["a", "c", "b"])):
        vocabulary = [[word, -1.0] for word in words]
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert "expected id 1 for 'b'" in str(vocabulary_difference(one, other))
    assert vocabulary_difference(one, one) is None


def test_external_engines_are_no_teachers(flags: Flags) -> None:
    flags["server_groups"].write_text(TRAIN + '[groups.far]\nrole = "frozen"\nexternal = ["10.0.0.1:30000"]\n')
    assert "external engines don't show their tokenizer" in problems(flags)[0]


def test_a_teacher_s_directory_is_a_model(flags: Flags, tmp_path: Path) -> None:
    flags["server_groups"].write_text(TRAIN + FROZEN.format(name="gone", model=tmp_path / "gone"))
    assert "[groups.gone]: model" in problems(flags)[0]
    assert "no such directory" in problems(flags)[0]


def test_a_teacher_alone_needs_no_reward(flags: Flags) -> None:
    alone = {**flags, "advantage_estimator": "on_policy_distillation"}
    assert list(check_rewards(assemble(alone, {}))) == []
    assert "no reward: give --rm-type" in next(check_rewards(assemble(flags, {})))
    ordered = {**alone, "batch_order": "reward_variance"}
    assert "reward_variance without a reward to compare" in next(check_rewards(assemble(ordered, {})))
    evaluated = {**alone, "eval_prompt_data": ("test.jsonl",)}
    assert "--eval-prompt-data without a reward" in next(check_rewards(assemble(evaluated, {})))
    filtered = {**alone, "group_filter": ("zero_variance",)}
    assert "zero_variance without a reward: nothing would pass" in next(check_group_filters(assemble(filtered, {})))
    rewarded = replace(Arguments(), rewards=RewardArguments(rm_type="math", group_filter=("zero_variance",)))
    assert list(check_group_filters(rewarded)) == []

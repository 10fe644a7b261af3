"""Rows that no reward could judge are found before anything is generated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from miles_async.arguments import Arguments, DataArguments, EvaluationArguments, RewardArguments
from miles_async.errors import DataError
from miles_async.prompts.row import PromptRow
from miles_async.rewards.row_check import RewardOfRow
from miles_async.runs.prompt_checks import check_prompts
from miles_async.types import Label

TESTS = {"inputs": ["1"], "outputs": ["2"]}


def check(label: Label | None, metadata: dict[str, object], **flags: object) -> None:
    row = PromptRow(row_id=None, content="", label=label, metadata=metadata)
    RewardOfRow(RewardArguments(**{"rm_type": "exact_match", **flags}))(row, "train.jsonl:7")


def problem(label: Label | None, metadata: dict[str, object], **flags: object) -> str:
    with pytest.raises(DataError) as caught:
        check(label, metadata, **flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("label", "metadata", "flags", "expected"),
    [
        ("1", {"rm_type": "gsm8k"}, {}, r"rm_type 'gsm8k' in --metadata-key\): .*expected one of exact_match"),
        (None, {}, {}, "exact_match compares with a label, and the row has none"),
        (None, {"rm_type": "math"}, {}, "math compares with a label"),
        (("4", " "), {}, {"rm_type": "math"}, "math compares with an answer, and the label is empty"),
        ("$$", {}, {"rm_type": "math"}, "math compares with an answer, and the label is empty"),
        ("12", {}, {"rm_type": "multiple_choice"}, "compares letters, the label is '12'"),
        ("x", {"rm_type": "code"}, {}, "expected tests in its metadata"),
        ("[]", {}, {"rm_type": "code"}, "its list of tests is empty"),
        (None, {"tests": TESTS | {"outputs": []}}, {"rm_type": "code"}, "1 inputs, but 0 outputs"),
        (None, {"rm_type": "remote_rm"}, {}, "remote_rm needs --rm-url"),
        (None, {"rm_type": "judge:0.5+format"}, {}, "judge needs --judge-url"),
        (None, {"rm_type": 3}, {}, "expected one of exact_match"),
        (("a", "12"), {}, {"rm_type": "multiple_choice"}, "compares letters, the label is '12'"),
    ],
)
def test_a_row_that_cannot_be_rewarded_is_named(
    label: Label | None, metadata: dict[str, object], flags: dict[str, object], expected: str
) -> None:
    found = problem(label, metadata, **flags)
    assert found.startswith("train.jsonl:7: its")
    assert re.search(expected, found)


@pytest.mark.parametrize(
    ("label", "metadata"),
    [("21", {}), (None, {"rm_type": "format"}), ("(b)", {"rm_type": "multiple_choice"}), (("2", "two"), {})],
)
def test_other_rows_pass(label: Label | None, metadata: dict[str, object]) -> None:
    check(label, metadata)


def test_overrides_of_an_evaluation_set_count_before_the_row_does(tmp_path: Path) -> None:
    """As the evaluation merges them: a reward they replace is not checked, one they name is."""
    (tmp_path / "e.jsonl").write_text('{"prompt": "2 + 2?", "label": "4", "metadata": {"rm_type": "deepscaler"}}\n')

    def dry_run(overrides: dict[str, object]) -> tuple[dict[str, int], list[str]]:
        data_set = {"name": "a", "path": "e.jsonl", "metadata_overrides": overrides}
        (tmp_path / "eval.json").write_text(json.dumps({"datasets": [data_set]}))
        return check_prompts(
            Arguments(
                data=DataArguments(prompt_data=(str(tmp_path / "t.jsonl"),), metadata_key="metadata"),
                rewards=RewardArguments(rm_type="exact_match"),
                evaluation=EvaluationArguments(eval_config=tmp_path / "eval.json"),
            )
        )

    (tmp_path / "t.jsonl").write_text('{"prompt": "2 + 2?", "label": "4"}\n')
    with pytest.raises(DataError, match=r"e\.jsonl:1: its own reward \(rm_type 'deepscaler' in --metadata-key\)"):
        dry_run({})
    counts, _ = dry_run({"rm_type": "math"})
    assert len(counts) == 2
    with pytest.raises(DataError, match=r"\(rm_type 'judge' in metadata_overrides\): judge needs --judge-url"):
        dry_run({"rm_type": "judge"})


@pytest.mark.parametrize(
    ("metadata", "rm_type", "noted"),
    [
        ({}, "exact_match", True),
        ({"rm_type": "f1"}, "exact_match", True),
        ({"rm_type": "remote_rm"}, "exact_match", False),
        ({}, "exact_match+remote_rm:0.5", False),
        ({"rm_type": "remote_rm"}, None, True),
    ],
)
def test_a_flag_of_a_reward_that_no_row_names_is_noted(
    metadata: dict[str, object], rm_type: str | None, noted: bool, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"prompt": "2 + 2?", "label": "4", "metadata": metadata}))
    data = DataArguments(prompt_data=(str(path),), metadata_key="metadata")
    own = {} if rm_type else {"custom_rm_path": "my:reward"}
    rewards = RewardArguments(rm_type=rm_type, rm_url="http://a", **own)
    _, notes = check_prompts(Arguments(data=data, rewards=rewards))
    note = "--rm-url http://a has no effect: neither --rm-type nor a row names remote_rm"
    assert notes == ([note] if noted else [])


@pytest.mark.parametrize(
    "metadata", [{"rm_type": "code", "tests": TESTS}, {"rm_type": "reasoning_gym", "source_dataset": "chain_sum"}]
)
def test_the_sandbox_is_asked_for_where_a_row_alone_names_what_executes(
    metadata: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_async.rewards.confinement.landlock_version", lambda: 0)
    found = problem(None, metadata, reward_sandbox="strict")
    assert "--reward-sandbox strict: expected a kernel with Landlock" in found

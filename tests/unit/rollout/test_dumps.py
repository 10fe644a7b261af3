"""Rollout data in Parquet files: what is read is what was written, and other files are refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from miles_async.errors import DataError
from miles_async.rollout.dumps import RolloutDump, read_dump, write_dump
from miles_async.runtime.serialization import encode
from miles_async.types import Attempt, Branch, Group, Prompt, Sample


def branch(length: int, prompt_length: int, seed: int) -> Branch:
    random = np.random.default_rng(seed)
    mask = (np.arange(length) >= prompt_length).astype(np.uint8)
    return Branch(
        tokens=random.integers(0, 150_000, length).astype(np.int32),
        prompt_length=prompt_length,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -random.random(length), 0.0).astype(np.float32),
        weight_versions=np.where(mask, seed % 7, -1).astype(np.int32),
        routed_experts=random.integers(0, 250, (length, 6)).astype(np.uint8),
    )


def sample(length: int, seed: int, *, branches: int = 1, prompt_length: int = 3, **fields: object) -> Sample:
    first, *others = [branch(length + more, prompt_length, seed) for more in range(branches)]
    given = {"text": f"answer {seed}", "finish_reason": "stop", "reward": 0.5, **fields}
    return Sample(**{**msgspec.structs.asdict(first), **given}, more_branches=tuple(others))


def group(attempt_id: int, *samples: Sample) -> Group:
    prompt = Prompt(
        prompt_id=f"train.jsonl:{attempt_id % 2}",  # two attempts of one prompt may be in one batch
        token_ids=tuple(samples[0].tokens[: samples[0].prompt_length].tolist()),
        text="was ist 2 + 2? ✓",
        label=None if attempt_id else "4",
        metadata={"source": {"page": 7}},
    )
    attempt = Attempt(attempt_id=attempt_id, prompt=prompt, epoch=3, issued_version=1)
    return Group(attempt=attempt, samples=samples, oldest_version=1, newest_version=4)


DUMP = RolloutDump(
    rollout_id=17,
    target_version=18,
    groups=(
        group(5, sample(9, 1), sample(4, 2, reward=None, metadata={"tools": ["a"]})),
        group(0, sample(30, 3, branches=3, finish_reason="length"), sample(6, 4, text='cut "here"\n')),
        group(2, sample(4, 6)),
    ),
)


def with_samples(*samples: Sample) -> RolloutDump:
    """A dump of one group."""
    return msgspec.structs.replace(DUMP, groups=(msgspec.structs.replace(DUMP.groups[2], samples=samples),))


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    write_dump(path := tmp_path / "new" / "17.parquet", DUMP)
    assert encode(read_dump(path)) == encode(DUMP)
    assert [path.name for path in path.parent.iterdir()] == ["17.parquet"]


@pytest.mark.parametrize("dtype", [np.int16, None])
def test_experts_are_read_as_they_were_or_are_absent(dtype: type[np.integer], tmp_path: Path) -> None:  # covers: M19
    """Files of runs that replay none have no such column."""

    def other(branch: Branch) -> Branch:
        experts = None if dtype is None else branch.routed_experts.astype(dtype) + 300
        return msgspec.structs.replace(branch, routed_experts=experts)

    groups = tuple(
        msgspec.structs.replace(
            group,
            samples=tuple(
                msgspec.structs.replace(other(sample), more_branches=tuple(map(other, sample.more_branches)))
                for sample in group.samples
            ),
        )
        for group in DUMP.groups
    )
    dump = msgspec.structs.replace(DUMP, groups=groups)
    write_dump(path := tmp_path / "17.parquet", dump)
    assert encode(read_dump(path)) == encode(dump)
    assert ("routed_experts" in parquet.read_schema(path).names) == (dtype is not None)


def test_a_teacher_s_log_probs_are_read_as_they_were(tmp_path: Path) -> None:
    logprobs = np.array([0.0, 0.0, 0.0, -1.5], np.float32)
    dump = with_samples(sample(4, 6, teacher_logprobs=logprobs))
    write_dump(path := tmp_path / "17.parquet", dump)
    assert encode(read_dump(path)) == encode(dump)


def test_rewards_of_tokens_are_read_as_they_were(tmp_path: Path) -> None:
    """A sample without is one whose tokens earned nothing."""
    rewards = np.array([0.0, 0.0, 0.0, 0.25], np.float32)
    for given in (rewards, None):
        dump = with_samples(*(sample(4, 6, token_rewards=array) for array in (rewards, given)))
        write_dump(path := tmp_path / "17.parquet", dump)
        found = [sample.token_rewards.tolist() for sample in read_dump(path).groups[0].samples]
        assert found == [rewards.tolist(), [0.0] * 4 if given is None else rewards.tolist()]


def test_a_row_is_a_branch_with_its_tokens(tmp_path: Path) -> None:
    write_dump(path := tmp_path / "17.parquet", DUMP)
    rows = parquet.read_table(path).to_pylist()
    assert [(row["attempt_id"], row["sample"], row["branch"]) for row in rows] == [
        (5, 0, 0), (5, 1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (2, 0, 0),
    ]  # fmt: skip
    for row, branch in zip(rows, (b for g in DUMP.groups for s in g.samples for b in s.branches), strict=True):
        assert row["tokens"] == branch.tokens.tolist()
        assert row["weight_versions"] == branch.weight_versions.tolist()
        assert row["rollout_logprobs"] == branch.rollout_logprobs.tolist()


def test_the_page_explains_every_column(tmp_path: Path) -> None:
    """Those that are not always there included."""
    optional = {name: np.zeros(4, np.float32) for name in ("teacher_logprobs", "token_rewards")}
    write_dump(path := tmp_path / "17.parquet", with_samples(sample(4, 6, **optional)))
    page = Path(__file__).parents[3] / "docs" / "debugging.md"
    cells = re.findall(r"^\| (`.*?) \|", page.read_text().partition("## Rollout data")[2], re.MULTILINE)
    explained = [name for cell in cells for name in re.findall("`(.*?)`", cell)]
    assert sorted(explained) == sorted(parquet.read_schema(path).names)


def without(column: str) -> arrow.Table:
    return table().drop_columns([column])


def replaced(column: str, values: arrow.Array) -> arrow.Table:
    whole = table()
    return whole.set_column(whole.column_names.index(column), column, values)


def table() -> arrow.Table:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as directory:
        write_dump(path := Path(directory) / "0.parquet", DUMP)
        return parquet.ParquetFile(path).read()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda: without("reward"), "there is no column reward"),
        (lambda: without("tokens"), "there is no column tokens"),
        (lambda: table().slice(0, 0), "there is no sample"),
        (lambda: replaced("sample", arrow.array(["a"] * 7)), r"Expected `int`.*sample"),
        (lambda: replaced("finish_reason", arrow.array(["tired"] * 7)), "tired"),
        (lambda: replaced("tokens", arrow.array([[1, 2**40]] * 7)), "not in range"),
        (lambda: replaced("loss_mask", arrow.array([[1]] * 6 + [None])), "is missing"),
        (lambda: replaced("loss_mask", arrow.array([[1]] * 7)), "length of tokens"),
        (lambda: replaced("routed_experts", arrow.array([[1]] * 7, arrow.list_(arrow.uint8()))), "reshape"),
        (lambda: replaced("metadata", arrow.array(["{"] * 7)), "truncated"),
    ],
)
def test_other_files_are_refused(content: object, problem: str, tmp_path: Path) -> None:
    parquet.write_table(content(), path := tmp_path / "x.parquet")
    with pytest.raises(DataError, match=rf"x\.parquet: expected what --save-debug-rollout-data writes.*({problem})"):
        read_dump(path)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "x.parquet").write_text("no")
    with pytest.raises(DataError, match=r"x\.parquet: expected"):
        read_dump(path)


def test_what_json_does_not_know_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    odd = RolloutDump(rollout_id=0, target_version=0, groups=(group(1, sample(5, 1, metadata={"x": object()})),))
    with pytest.raises(DataError, match="--save-debug-rollout-data: cannot write"):
        write_dump(tmp_path / "0.parquet", odd)
    assert not list(tmp_path.iterdir())

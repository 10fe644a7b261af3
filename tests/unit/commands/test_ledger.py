"""``miles-async ledger`` and ``miles-async explain``, as a user calls them.

# covers: C2, C6
"""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.checkpoints.manifest import RunIdentity
from miles_async.checkpoints.run_checkpoints import RunCheckpoints
from miles_async.cli import main
from miles_async.errors import DataError
from miles_async.ledger.readmission import read_readmissions, request_readmission
from miles_async.ledger.writer import LedgerWriter
from miles_async.rollout.checkpoint import RolloutSnapshot, read_snapshot, write_snapshot
from miles_async.seams import Position, Resumption
from miles_async.staleness.attempts import RetryPolicy
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.types import Attempt
from tests.fakes.fake_sides import FakeTrainer
from tests.property.builders import make_group, make_prompt
from tests.unit.commands.command_line import printed, refused

NAMES = ("train.jsonl:5", "train.jsonl:6", "train.jsonl:7")


class Story:
    """A pool with a batch size of 1 that lives through everything, one second per event."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.writer = LedgerWriter(run_dir / "ledger.sqlite", clock=map(float, itertools.count(100)).__next__)
        self.prompts = iter(NAMES)
        self.pool = Pool(
            StalenessPolicy(bound=2, lead_batches=3, batch_size=1, action="recycle"),
            RetryPolicy(max_prompt_attempts=2, max_quarantined_prompts=9, recycle_stale=True),
            observers=[self.writer.note],
        )
        self.pool.commit(0)

    def issue(self, version: int) -> Attempt:
        if self.pool.needs_prompt():
            self.pool.offer(0, make_prompt(next(self.prompts)))
        return self.pool.issue(version)

    def fail_twice(self, version: int) -> None:
        for _ in range(2):
            self.pool.failed(self.issue(version), "reward raised ZeroDivisionError()", infrastructure=False)

    async def tell(self) -> None:
        self.pool.finished(make_group(self.issue(3), [[3, 4, 4], [3, 3]]))  # attempt 0
        assert self.pool.cut(6) is None  # age 3
        self.pool.finished(make_group(self.issue(5), [[5], [5]]))  # attempt 1
        self.pool.trained(self.pool.cut(6), 6)
        self.fail_twice(6)  # attempts 2 and 3
        self.issue(6)  # attempt 4, which is still under way
        await self.writer.flush()


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    story = Story(tmp_path / "run")
    await story.tell()
    return tmp_path / "run"


async def test_explain_tells_a_prompts_story_attempt_by_attempt(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "explain", run_dir, "train.jsonl:5") == (
        "attempt 0 of prompt train.jsonl:5 (epoch 0): too old, recycled\n"
        "  issued 0.0 s into the run under version 3\n"
        "  generated in 1.0 s: 2 samples of 2–3 tokens with versions 3–4, 1 of them across versions\n"
        "  reward 1 (mean)\n"
        "  recycled: age 3 at the cut for version 6\n"
        "  the prompt came again as attempt 1\n"
        "\n"
        "attempt 1 of prompt train.jsonl:5 (epoch 0): trained in step 1\n"
        "  issued 3.0 s into the run under version 5, after 1 earlier attempt\n"
        "    earlier: stale: age 3\n"
        "  generated in 1.0 s: 2 samples of 1 token with version 5\n"
        "  reward 1 (mean)\n"
        "  waited 1.0 s, cut for version 6 (age 1)\n"
        "  trained in step 1, 4.0 s after it was issued\n"
    )


async def test_explain_tells_of_one_group_by_its_attempt(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "explain", run_dir, 3)
    assert "attempt 3 of prompt train.jsonl:6 (epoch 0): failed, and the prompt is quarantined" in out
    assert "quarantined after 1.0 s: data: reward raised ZeroDivisionError()" in out
    assert "being generated and rewarded when the ledger was last written" in printed(capsys, "explain", run_dir, 4)


async def test_ledger_shows_the_balance_and_the_reasons(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "ledger", run_dir)
    assert "     5  issued\n     1  recycled\n     1  trained\n     1  failed\n     1  quarantined\n" in out
    assert "balanced: issued = 1 + 1 + 1 + 1 + 1\n" in out
    assert "     1  stale recycled: age 3\n" in out
    assert (
        "response lengths (tokens)\n   mean  longest  samples\n"
        "    2.5        3        2  stale recycled\n"
        "    1.0        1        2  trained\n"
    ) in out


async def test_dead_letters_have_every_attempts_reason(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "  data: reward raised ZeroDivisionError()\n"
    assert printed(capsys, "ledger", run_dir, "--dead-letter") == f"train.jsonl:6 (epoch 0)\n{reason}{reason}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("ledger", "rnu"), "there is no directory"),
        (("ledger", "rnu"), "run?"),
        (("explain", "run", "train.jsonl:55"), "did you mean train.jsonl:5?"),
        (("explain", "run", "jsonl:6"), "did you mean train.jsonl:6?"),
        (("explain", "run", "99"), "no prompt and no attempt '99' in this ledger (attempts 0 to 4)"),
        (("explain", "run"), "the following arguments are required: PROMPT_OR_ATTEMPT; see miles-async explain --help"),
        (("ledger", "run", "--readmit", "train.jsonl:66"), "is not quarantined; did you mean train.jsonl:6?"),
        (("ledger", "run", "--readmit", "train.jsonl:6"), "name the directory of --save instead"),
        (("ledger", "empty"), "expected a run directory (ledger.sqlite) or checkpoints (iter_...)"),
        (("explain", "empty", "train.jsonl:5"), "expected a run directory with a ledger.sqlite"),
        (("ledger", "empty", "--dead-letter"), "expected a run directory (ledger.sqlite) or checkpoints (iter_...)"),
    ],
)
async def test_a_name_that_does_not_exist_is_answered_with_the_nearest(
    run_dir: Path,
    words: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (run_dir.parent / "empty").mkdir()
    monkeypatch.chdir(run_dir.parent)
    assert says in refused(capsys, *words)


MODEL = Path(__file__).parents[3] / "examples" / "quickstart" / "assets" / "reverse" / "model"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("train.jsonl:8", "it was filtered by length: it has 27 tokens, and --rollout-max-prompt-len is 20\n"),
        (
            "train.jsonl:9",
            "it was not reached: it is number 9 of 9 in the first epoch, and 3 prompts have been issued\n",
        ),
        ("train.jsonl:10", "it never existed: {data} has no such prompt; did you mean train.jsonl:"),
    ],
)
async def test_explain_says_why_a_prompt_was_never_issued(
    run_dir: Path, prompt: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run_dir.parent / "train.jsonl"
    texts = ["rev 12"] * 7 + ["rev " + "1" * 20, "rev 12"]
    data.write_text("".join(f'{{"prompt": "{text}", "label": ""}}\n' for text in texts))
    (run_dir / "config.toml").write_text(
        f'[model]\nhf-checkpoint = "{MODEL}"\n[data]\nprompt-data = "{data}"\nrollout-max-prompt-len = 20\n'
        "rollout-shuffle = false\n[rollout]\nrollout-max-response-len = 64\n"
    )
    assert says.format(data=data) in refused(capsys, "explain", run_dir, prompt)


async def test_ledger_shows_the_balance_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(tmp_path / "run")
    await story.tell()
    await save_checkpoint(story, tmp_path / "save", 1)
    out = printed(capsys, "ledger", tmp_path / "save")
    assert f"\n{tmp_path / 'save' / 'iter_0000001'}, when it was written:\n     5  issued\n" in "\n" + out
    assert "     1  in flight\nbalanced: issued = 1 + 1 + 1 + 1 + 1\n" in out
    assert "     1  stale recycled: age 3\n" in out


# ---------------------------------------------------------------------------------------------------- readmission
class Rollout:
    """RolloutSide as checkpoints need it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def snapshot(self) -> None: ...

    async def save(self, directory: Path) -> dict[str, str]:
        snapshot = self.pool.snapshot()
        state = msgspec.structs.replace(snapshot.state, steps=int(directory.stem.removeprefix("iter_")))
        return write_snapshot(
            directory, RolloutSnapshot(source={}, pool=msgspec.structs.replace(snapshot, state=state))
        )

    async def load(self, directory: Path, resumption: Resumption) -> None:
        snapshot = read_snapshot(directory).pool
        self.pool.restore(
            snapshot,
            version=resumption.version,
            readmissions=resumption.readmissions,
            accepted=resumption.accepted,
        )


def run_checkpoints(story: Story, arguments: CheckpointArguments, **function: object) -> RunCheckpoints:
    """``function``: fields of the model's config."""
    identity = RunIdentity(run="run", model={"function": function}, ranks={})
    return RunCheckpoints(FakeTrainer([]), Rollout(story.pool), arguments, identity)  # type: ignore[arg-type]


async def resume(story: Story, save: Path, *anyway: str, **function: object) -> Story:
    checkpoints = run_checkpoints(story, CheckpointArguments(load=save, load_anyway=anyway), **function)
    await checkpoints.load()
    return story


async def save_checkpoint(story: Story, save: Path, step: int, **function: object) -> None:
    checkpoints = run_checkpoints(story, CheckpointArguments(save=save), **function)
    await checkpoints.save(Position(step=step))
    await checkpoints.finish()


async def test_a_readmitted_prompt_gets_another_budget_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # covers: C9, M8
    save = tmp_path / "save"
    first = Story(tmp_path / "first")
    (tmp_path / "first" / "config.toml").write_text(f'[checkpoint]\nsave = "{save}"\n')
    first.fail_twice(0)
    await first.writer.flush()
    await save_checkpoint(first, save, 1)
    assert "train.jsonl:5 (epoch 0)\n  data: reward" in printed(capsys, "ledger", save, "--dead-letter")
    assert "train.jsonl:5 another budget" in printed(capsys, "ledger", tmp_path / "first", "--readmit", "all")

    second = await resume(Story(tmp_path / "second"), save)
    attempt = second.issue(0)  # before any fresh prompt
    assert (attempt.prompt.prompt_id, attempt.data_failures, attempt.history[-1]) == (NAMES[0], 0, "readmitted")
    second.pool.failed(attempt, "boom", infrastructure=False)
    second.pool.failed(second.issue(0), "boom", infrastructure=False)
    await second.writer.flush()
    await save_checkpoint(second, save, 2)
    assert "data: boom" in printed(capsys, "ledger", tmp_path / "second", "--dead-letter")

    third = await resume(Story(tmp_path / "third"), save)  # the old request is not granted again
    await third.writer.flush()
    assert [letter.prompt_id for letter in third.pool._book.dead_letters] == [NAMES[0]]
    assert "train.jsonl:5" in printed(capsys, "ledger", tmp_path / "third", "--dead-letter")
    assert "4  issued, 4 of them before --load" in printed(capsys, "ledger", tmp_path / "third")
    assert third.pool.needs_prompt()

    assert main(["ledger", str(save / "iter_0000002"), "--readmit", NAMES[0]]) == 0  # a new one is
    fourth = await resume(Story(tmp_path / "fourth"), save)
    assert fourth.issue(0).prompt.prompt_id == NAMES[0]


async def test_a_change_of_the_model_accepted_at_a_resume_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # covers: C9, C12
    save = tmp_path / "save"
    await save_checkpoint(Story(tmp_path / "first"), save, 1, rope_theta=10000.0)
    second = await resume(Story(tmp_path / "second"), save, "rope_theta", rope_theta=500.0)
    second.issue(0)
    await second.writer.flush()
    shown = "resumed although this has changed, by --load-anyway: rope_theta was 10000.0 and is 500.0\n"
    assert shown in printed(capsys, "ledger", tmp_path / "second")
    assert shown in printed(capsys, "explain", tmp_path / "second", "0")

    third = await resume(Story(tmp_path / "third"), save, "rope_theta", rope_theta=10000.0)  # nothing has changed
    await third.writer.flush()
    assert "--load-anyway" not in printed(capsys, "ledger", tmp_path / "third")


def test_a_readmission_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    request_readmission(tmp_path / "save", ["p1"])
    path = request_readmission(tmp_path / "save", ["p2"])
    assert list(read_readmissions(tmp_path / "save").values()) == [("p1",), ("p2",)]
    for content in (b'["p1"]', b'{"a": ["caf\xe9"]}'):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"readmit\.json: expected request ids"):
            read_readmissions(tmp_path / "save")


def test_help_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ledger", "explain"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert "run directory" in capsys.readouterr().out

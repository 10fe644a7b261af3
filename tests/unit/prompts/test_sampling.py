"""``--prompt-sampler``: which prompts an epoch has, by what is known of them when it begins.

# covers: R11
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from miles_async.api import EpochRows
from miles_async.arguments import DataArguments
from miles_async.errors import CheckpointError, ConfigurationError, DataError
from miles_async.ledger.store import LedgerStore
from miles_async.prompts.source import FilePromptSource
from miles_async.staleness.events import EpochBegan, Finished, Issued
from miles_async.staleness.versions import group_of
from miles_async.types import Attempt, Prompt
from tests.property.builders import make_sample

ROWS = 12


@pytest.fixture
def path(tmp_path: Path) -> str:
    lines = [
        json.dumps({"prompt": f"p {row}", "label": "1", "id": f"i{row}", "m": {"level": -row}}) for row in range(ROWS)
    ]
    lines.insert(1, "")  # numbers of lines are not those of rows
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "t.jsonl")


def source(path: str, *, began: list[EpochBegan] | None = None, anyway: tuple[str, ...] = (), **flags: object):
    data = DataArguments(prompt_data=(path,), **{"prompt_sampler": "difficulty", **flags})
    note = (lambda event: None) if began is None else began.append
    return FilePromptSource(data, lambda content, tools: str(content).encode(), anyway=anyway, began=note)


def finish(source: FilePromptSource, prompt: Prompt, *rewards: float) -> None:
    samples = [make_sample([0], reward=reward) for reward in rewards]
    source.note(Finished(group_of(Attempt(attempt_id=0, prompt=prompt, epoch=0), samples)))


def texts(taken: Iterable[tuple[int, Prompt]]) -> list[str]:
    return [prompt.text for _, prompt in taken]


def after_one_epoch(path: str, always: int, never: int, **flags: object) -> FilePromptSource:
    """The first ``always`` rows are always solved, the next ``never`` ones never, the others sometimes."""
    opened = source(path, **flags)
    for _, prompt in opened.take(ROWS):
        row = int(prompt.text.removeprefix("p "))
        finish(opened, prompt, *([1.0, 1.0] if row < always else [0.0, 0.9] if row < always + never else [0.0, 1.0]))
    return opened


class TestDifficulty:
    def test_what_is_not_known_yet_comes_once(self, path: str) -> None:
        assert sorted(texts(source(path).take(ROWS))) == sorted(f"p {row}" for row in range(ROWS))

    @pytest.mark.parametrize("flags", [{}, {"prompt_id_key": "id"}, {"rollout_shuffle": False}])
    def test_what_is_always_or_never_solved_comes_in_one_of_four_epochs(self, path: str, flags: dict) -> None:
        opened = after_one_epoch(path, 3, 3, **flags)
        taken = opened.take(4 * 6 + 6)
        epochs = Counter(epoch for epoch, _ in taken)
        assert sorted(epochs) == [1, 2, 3, 4]
        assert len(set(taken_pairs := [(epoch, prompt.text) for epoch, prompt in taken])) == len(taken_pairs)
        assert Counter(texts(taken)) == {f"p {row}": 1 if row < 6 else 4 for row in range(ROWS)}

    def test_the_window_and_the_rest_are_flags(self, path: str) -> None:
        opened = after_one_epoch(path, 0, 0, difficulty_low=0.5, difficulty_rest=2)  # half is low now
        assert Counter(texts(opened.take(ROWS))) == {f"p {row}": 1 for row in range(ROWS)}
        opened = after_one_epoch(path, 0, 4, solved_reward=0.9)  # 0.9 solves: now these are solved by half
        assert len({*texts(opened.take(ROWS))}) == ROWS

    def test_a_prompt_that_is_solved_sometimes_again_comes_in_every_epoch(self, path: str) -> None:
        opened = after_one_epoch(path, ROWS, 0)
        taken = opened.take(ROWS)  # four epochs
        assert sorted(texts(taken)) == sorted(f"p {row}" for row in range(ROWS))
        for _, prompt in taken:
            finish(opened, prompt, 0.0, 1.0)
        last = opened.state()["epoch"]
        following = opened.take(2 * ROWS)
        assert Counter(epoch for epoch, _ in following if epoch > last + 1) == {last + 2: ROWS}

    def test_an_epoch_is_decided_when_it_begins(self, path: str) -> None:
        opened, uninterrupted = after_one_epoch(path, 3, 3), after_one_epoch(path, 3, 3)
        begun = opened.take(1)
        for row in range(ROWS):
            finish(opened, Prompt(prompt_id=f"t.jsonl:{row + 2}", token_ids=(1,), text=""), 1.0)
        size = opened.state()["given"] and len(opened._streams[0].rows)
        assert begun + opened.take(size - 1) == uninterrupted.take(size)

    @pytest.mark.parametrize("before", [0, 1, 3, 6, 9])
    def test_a_resume_changes_nothing(self, path: str, before: int) -> None:
        uninterrupted, first = after_one_epoch(path, 3, 3), after_one_epoch(path, 3, 3)
        whole = uninterrupted.take(40)
        first.take(before)
        state = json.loads(json.dumps(first.state()))
        second = source(path)
        second.restore(state)
        assert second.take(40 - before) == whole[before:]
        assert json.loads(json.dumps(second.state())) == json.loads(json.dumps(uninterrupted.state()))

    def test_another_window_is_a_change(self, path: str) -> None:
        state = after_one_epoch(path, 3, 3).state()
        with pytest.raises(CheckpointError, match=r"sampler was 'difficulty, from 0 to 1, .* Restore --prompt-sampler"):
            source(path, difficulty_low=0.2).restore(state)
        with pytest.raises(CheckpointError, match="Restore --prompt-sampler"):
            source(path, prompt_sampler="uniform").restore(state)
        accepted = source(path, difficulty_low=0.2, anyway=("prompt_data",))
        accepted.restore(state)
        assert {epoch for epoch, _ in accepted.take(3)} == {1}

    def test_results_of_prompts_that_are_no_longer_in_their_row_are_ignored(self, path: str) -> None:
        """Rows without ids are known by their numbers. Groups and attempts of old data end after the change."""
        first = source(path)
        old = [prompt for _, prompt in first.take(ROWS)]
        same = {"prompt": "p 7", "label": "1"}
        lines = [same if row == 8 else {"prompt": f"new {row}", "label": "1"} for row in range(ROWS + 1)]
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))
        changed = source(path, anyway=("prompt_data",))
        changed.restore(json.loads(json.dumps(first.state())))
        for prompt in old:
            finish(changed, prompt, 1.0, 1.0)
        assert changed.state()["known"] == [(8, 1.0)]

    def test_epochs_are_told_with_what_they_leave_out(self, path: str) -> None:
        began: list[EpochBegan] = []
        opened = source(path, began=began)
        for _, prompt in opened.take(ROWS):
            finish(opened, prompt, 1.0)
        opened.take(ROWS)
        assert began[0] == EpochBegan("all", 0, "difficulty", ROWS, 0)
        later = [event for event in began[1:] if event.epoch <= 4]
        assert [event.epoch for event in later] == [1, 2, 3, 4]
        assert sum(event.prompts for event in later) == ROWS
        assert all(event.prompts + event.left_out == ROWS for event in later)

    def test_ids_of_nothing_that_is_there_are_ignored(self, path: str) -> None:
        opened = source(path)
        for prompt_id in ("t.jsonl:2", "t.jsonl:99", "u.jsonl:1", "t.jsonl:x", "i1"):
            finish(opened, Prompt(prompt_id=prompt_id, token_ids=(1,), text=""), 1.0)
        assert "known" not in opened.state()


def earlier_run(run_dir: Path, path: str, rewards: dict[int, tuple[float, ...]], **flags: object) -> str:
    """A run directory with one finished group for each of these rows; its path."""
    opened = source(path, prompt_sampler="uniform", **flags)
    run_dir.mkdir()
    store = LedgerStore(run_dir / "ledger.sqlite")
    store.write([(0.0, opened.opened)])
    for number, (_, prompt) in enumerate(opened.take(ROWS)):
        if (row := int(prompt.text.removeprefix("p "))) in rewards:
            attempt = Attempt(attempt_id=number, prompt=prompt, epoch=0)
            samples = [make_sample([0], reward=reward) for reward in rewards[row]]
            store.write([(1.0, Issued(attempt=attempt)), (2.0 + number, Finished(group_of(attempt, samples)))])
    store.close()
    return str(run_dir)


EXTREMES = {row: (1.0, 1.0) if row < 3 else (0.0, 0.9) if row < 6 else (0.0, 1.0) for row in range(9)}


class TestEarlierRuns:
    @pytest.mark.parametrize("flags", [{}, {"prompt_id_key": "id"}])
    def test_what_they_always_or_never_solved_comes_less_often_from_the_start(
        self, path: str, tmp_path: Path, flags: dict
    ) -> None:
        run_dir = earlier_run(tmp_path / "run", path, EXTREMES, **flags)
        opened = source(path, pass_rates=(run_dir,), **flags)
        assert opened.opened.earlier_rates == 9
        assert Counter(texts(opened.take(4 * 6 + 6))) == {f"p {row}": 1 if row < 6 else 4 for row in range(ROWS)}

    def test_own_groups_count_more_and_a_resume_changes_nothing(self, path: str, tmp_path: Path) -> None:
        flags = {"pass_rates": (earlier_run(tmp_path / "run", path, EXTREMES),)}
        uninterrupted, first = source(path, **flags), source(path, **flags)
        for opened in (uninterrupted, first):
            for _, prompt in opened.take(6):
                finish(opened, prompt, 1.0)
        state = json.loads(json.dumps(first.state()))
        second = source(path, **flags)
        second.restore(state)
        whole = uninterrupted.take(30)
        assert second.take(30) == whole
        assert whole != source(path, **flags).take(36)[6:]

    def test_other_rates_at_a_resume_are_a_change(self, path: str, tmp_path: Path) -> None:
        flags = {"pass_rates": (earlier_run(tmp_path / "run", path, EXTREMES),)}
        state = source(path, **flags).state()
        same = earlier_run(tmp_path / "copy", path, EXTREMES)
        source(path, pass_rates=(same,)).restore(state)
        other = earlier_run(tmp_path / "other", path, EXTREMES | {0: (0.0, 1.0)})
        for changed in ((other,), ()):
            with pytest.raises(CheckpointError, match=r"pass_rates was '9 prompts, .* Restore --pass-rates,"):
                source(path, pass_rates=changed).restore(state)
        accepted = source(path, pass_rates=(other,), anyway=("prompt_data",))
        accepted.restore(state)
        assert "p 0" in texts(accepted.take(7))

    def test_of_several_runs_the_last_one_that_has_a_prompt_decides(self, path: str, tmp_path: Path) -> None:
        first = earlier_run(tmp_path / "first", path, EXTREMES)
        later = earlier_run(tmp_path / "later", path, {0: (0.0, 1.0)})
        opened = of_user(path, "hardest_first", metadata_key="m", pass_rates=(first, later))
        assert opened._rates == {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.0, 4: 0.0, 5: 0.0, 6: 0.5, 7: 0.5, 8: 0.5}

    def test_the_last_group_counts_by_the_rewards_that_solve_now(self, path: str, tmp_path: Path) -> None:
        run_dir = earlier_run(tmp_path / "run", path, {0: (0.0, 0.5, 1.0, 1.0)})
        assert source(path, pass_rates=(run_dir,), solved_reward=0.5)._rates == {0: 0.75}

    def test_rows_that_are_known_by_their_numbers_must_be_the_same(self, path: str, tmp_path: Path) -> None:
        by_number = earlier_run(tmp_path / "run", path, EXTREMES)
        by_id = earlier_run(tmp_path / "ids", path, EXTREMES, prompt_id_key="id")
        lines = Path(path).read_text().splitlines()
        Path(path).write_text("\n".join(lines[::-1]))
        with pytest.raises(DataError, match=r"--pass-rates .*/run: .*t\.jsonl has changed since that run"):
            source(path, pass_rates=(by_number,))
        assert source(path, pass_rates=(by_id,), prompt_id_key="id")._rates[ROWS - 1] == 1.0  # row 0 is the last now

    def test_directories_that_tell_nothing_are_refused(self, path: str, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"expected a run directory with a ledger\.sqlite"):
            source(path, pass_rates=(str(tmp_path),))
        (tmp_path / "early").mkdir()
        LedgerStore(tmp_path / "early" / "ledger.sqlite").close()  # it ended before it opened its prompts
        for run_dir in (str(tmp_path / "early"), earlier_run(tmp_path / "none", path, {})):
            with pytest.raises(DataError, match="finished no group of a prompt of"):
                source(path, pass_rates=(run_dir,))


def hardest_first(rows: EpochRows) -> Iterable[int]:
    return sorted(rows.rows, key=lambda row: rows.metadata(row)["level"])


def half_by_chance(rows: EpochRows) -> Iterable[int]:
    return rows.random.permutation(len(rows.rows))[: len(rows.rows) // 2]


def unsolved_only(rows: EpochRows) -> Iterable[int]:
    return [row for row in rows.rows if rows.pass_rates.get(row, 0.0) < 1.0]


_calls: list[int] = []


def unsteady(rows: EpochRows) -> Iterable[int]:
    _calls.append(1)
    return rows.rows[:: -1 if len(_calls) % 2 else 1]


def none_at_all(rows: EpochRows) -> Iterable[int]:
    return ()


def out_of_range(rows: EpochRows) -> Iterable[int]:
    return [0, 99]


def texts_instead(rows: EpochRows) -> Iterable[int]:
    return ["a"]


def broken(rows: EpochRows) -> Iterable[int]:
    return [1 // 0]


def of_user(path: str, name: str, **flags: object) -> FilePromptSource:
    return source(path, prompt_sampler=f"{__name__}:{name}", **flags)


class TestOfTheUser:
    def test_it_gives_the_order(self, path: str) -> None:
        taken = texts(of_user(path, "hardest_first", metadata_key="m").take(ROWS + 1))
        assert taken == [*(f"p {row}" for row in reversed(range(ROWS))), f"p {ROWS - 1}"]

    def test_its_chance_is_the_epochs(self, path: str) -> None:
        first, second = (texts(of_user(path, "half_by_chance").take(ROWS)) for _ in range(2))
        assert first == second
        assert first[: ROWS // 2] != first[ROWS // 2 :]
        assert texts(of_user(path, "half_by_chance", rollout_seed=7).take(ROWS)) != first

    def test_it_sees_pass_rates(self, path: str) -> None:
        opened = of_user(path, "unsolved_only")
        for _, prompt in opened.take(ROWS):
            finish(opened, prompt, float(prompt.text == "p 3"))
        assert "p 3" not in texts(opened.take(ROWS - 1))

    def test_it_resumes(self, path: str) -> None:
        whole = of_user(path, "half_by_chance").take(20)
        first, second = of_user(path, "half_by_chance"), of_user(path, "half_by_chance")
        first.take(8)
        second.restore(json.loads(json.dumps(first.state())))
        assert second.take(12) == whole[8:]

    def test_one_that_depends_on_something_else_is_refused_at_a_resume(self, path: str) -> None:
        first = of_user(path, "unsteady")
        first.take(2)
        with pytest.raises(CheckpointError, match="orders epoch 0 differently than before the checkpoint: it has to"):
            of_user(path, "unsteady").restore(first.state())

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("none_at_all", "epoch 0: expected indices of rows, found none"),
            ("out_of_range", "epoch 0: expected indices from 0 to 11, found 99"),
            ("texts_instead", "epoch 0: "),
            ("broken", "epoch 0: .*ZeroDivisionError"),
        ],
    )
    def test_what_is_no_order_ends_the_run_with_its_name(self, path: str, name: str, message: str) -> None:
        with pytest.raises(DataError, match=rf"--prompt-sampler .*:{name}: {message}"):
            of_user(path, name).take(1)

    def test_one_that_is_not_there(self, path: str) -> None:
        with pytest.raises(ConfigurationError, match="--prompt-sampler"):
            of_user(path, "absent")

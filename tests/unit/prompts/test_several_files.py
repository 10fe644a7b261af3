"""Several files of prompts: as one, or by weight; compressed ones; and what became of them at a resume.

# covers: R11
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from miles_async.arguments import DataArguments
from miles_async.errors import CheckpointError, ConfigurationError, DataError
from miles_async.prompts.source import FilePromptSource
from miles_async.types import JsonObject


def write(path: Path, rows: int, *, begin: str = "") -> str:
    lines = (json.dumps({"prompt": f"{begin or path.stem} {row}", "label": "1"}) for row in range(rows))
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def source(*places: str, weights: tuple[str, ...] = (), anyway: tuple[str, ...] = (), **flags: object):
    data = DataArguments(prompt_data=places, prompt_data_weights=weights, **flags)
    return FilePromptSource(data, lambda content, tools: str(content).encode(), anyway=anyway)


def texts(taken: list) -> list[str]:
    return [prompt.text for _, prompt in taken]


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "a.jsonl", 6), write(tmp_path / "b.jsonl", 2)


class TestWithoutWeights:
    def test_an_epoch_has_every_row_of_every_file_once(self, places: tuple[str, str]) -> None:
        taken = source(*places).take(16)
        rows = sorted([*(f"a {row}" for row in range(6)), "b 0", "b 1"])
        assert [sorted(texts(taken[:8])), sorted(texts(taken[8:]))] == [rows, rows]
        assert [epoch for epoch, _ in taken] == [0] * 8 + [1] * 8
        assert texts(taken[:8]) != texts(taken[8:])

    def test_ids_and_messages_name_the_file(self, places: tuple[str, str], tmp_path: Path) -> None:
        taken = source(*places, rollout_shuffle=False).take(8)
        assert [prompt.prompt_id for _, prompt in taken][4:] == ["a.jsonl:5", "a.jsonl:6", "b.jsonl:1", "b.jsonl:2"]
        (tmp_path / "b.jsonl").write_text('{"prompt": "b 0", "label": "1"}\n{"prompt": "b 1"}\n')
        with pytest.raises(DataError, match=r"b\.jsonl:2: no key 'label'"):
            source(*places)

    def test_names_tell_files_of_one_name_apart(self, tmp_path: Path) -> None:
        for folder in ("x", "y"):
            (tmp_path / folder).mkdir()
        first, second = write(tmp_path / "x/t.jsonl", 1), write(tmp_path / "y/t.jsonl", 1)
        with pytest.raises(ConfigurationError, match=r"are both called t\.jsonl, .*: give one a name before it"):
            source(first, second)
        taken = source(first, "other", second, rollout_shuffle=False).take(2)
        assert [prompt.prompt_id for _, prompt in taken] == ["t.jsonl:1", "other:1"]

    def test_an_id_of_two_files_is_refused(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / f"{name}.jsonl").write_text('{"prompt": "p", "label": "1", "id": 7}\n')
        with pytest.raises(DataError, match=r"b\.jsonl:1: duplicate id '7' .*: .*a\.jsonl:1 has it too"):
            source(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), prompt_id_key="id")


class TestByWeight:
    def test_every_stretch_has_the_shares(self, places: tuple[str, str]) -> None:
        taken = texts(source(*places, weights=("3", "1")).take(400))
        for begin in range(0, 400, 4):
            assert Counter(text[0] for text in taken[begin : begin + 4]) == {"a": 3, "b": 1}

    def test_each_file_has_epochs_of_its_own(self, places: tuple[str, str]) -> None:
        taken = source(*places, weights=("1", "1")).take(24)
        for file, rows in (("a", 6), ("b", 2)):
            of_file = [(epoch, prompt.text) for epoch, prompt in taken if prompt.text[0] == file]
            assert [epoch for epoch, _ in of_file] == [number // rows for number in range(12)]
            assert {Counter(epoch for epoch, _ in of_file)[epoch] for epoch in range(12 // rows)} == {rows}
            assert len(set(of_file)) == 12

    def test_prompts_that_are_too_long_take_no_share(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(
            "".join(json.dumps({"prompt": "a" * length, "label": "1"}) + "\n" for length in (1, 9, 9, 9))
        )
        mixed = source(
            str(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", 1), weights=("1", "1"), rollout_max_prompt_len=3
        )
        assert Counter(text[0] for text in texts(mixed.take(20))) == {"a": 10, "b": 10}

    def test_a_file_without_a_usable_prompt_is_named_before_anything_starts(self, places: tuple[str, str]) -> None:
        long = write(Path(places[1]), 2, begin="too long for this")
        flags = {"rollout_max_prompt_len": 9}
        weighted = source(places[0], long, weights=("3", "1"), **flags)
        for use in (weighted.require_usable, lambda: weighted.take(8)):
            with pytest.raises(DataError, match=r"^\S*b\.jsonl: all 2 prompts have more than 9 tokens"):
                use()
        mixed = source(places[0], long, **flags)
        mixed.require_usable()
        assert set(texts(mixed.take(12))) == {f"a {row}" for row in range(6)}

    @pytest.mark.parametrize("taken_before", [0, 1, 7, 16])
    def test_resumes_where_it_was(self, places: tuple[str, str], taken_before: int) -> None:
        uninterrupted = source(*places, weights=("0.7", "0.3")).take(40)
        first, second = (source(*places, weights=("0.7", "0.3")) for _ in range(2))
        first.take(taken_before)
        second.restore(json.loads(json.dumps(first.state())))
        assert second.take(40 - taken_before) == uninterrupted[taken_before:]

    @pytest.mark.parametrize("weights", [("1",), ("1", "0"), ("1", "x"), ("1", "inf"), ("1", "1", "1")])
    def test_wrong_ones(self, weights: tuple[str, ...], places: tuple[str, str]) -> None:
        with pytest.raises(
            ConfigurationError, match=r"--prompt-data-weights .*: expected a number above 0 for each of t"
        ):
            source(*places, weights=weights)


class TestChanged:
    """Content that is not what was saved is named; it can be accepted."""

    def saved(self, places: tuple[str, str], **flags: object) -> JsonObject:
        first = source(*places, **flags)
        first.take(3)
        return json.loads(json.dumps(first.state()))

    def test_the_file_is_named(self, places: tuple[str, str], tmp_path: Path) -> None:
        state = self.saved(places)
        write(tmp_path / "b.jsonl", 2, begin="c")
        with pytest.raises(CheckpointError) as caught:
            source(*places).restore(state)
        assert str(caught.value).startswith(f"{places[1]}: cannot continue in the middle of other prompts: digest was")
        assert "if the change is meant, add --load-anyway prompt_data" in str(caught.value)

    @pytest.mark.parametrize("change", [{"weights": ("1", "2")}, {"weights": ("2", "1")}])
    def test_other_weights_are_a_change(self, change: dict, places: tuple[str, str]) -> None:
        with pytest.raises(CheckpointError, match="Restore --prompt-data-weights"):
            source(*places, **change).restore(self.saved(places, weights=("1", "1")))
        with pytest.raises(CheckpointError, match="Restore --prompt-data-weights"):
            source(*places).restore(self.saved(places, **change))

    def test_an_accepted_change_begins_the_next_epoch(self, places: tuple[str, str], tmp_path: Path) -> None:
        state = self.saved(places)
        write(tmp_path / "b.jsonl", 3)
        changed = source(*places, anyway=("prompt_data",))
        changes = changed.restore(state)
        assert changes[0] == "prompt_data: rows was [6, 2] and is [6, 3]"
        taken = changed.take(9)
        assert {epoch for epoch, _ in taken} == {1}
        assert len(set(texts(taken))) == 9

    def test_nothing_is_accepted_where_nothing_changed(self, places: tuple[str, str]) -> None:
        state = self.saved(places)
        same = source(*places, anyway=("prompt_data",))
        assert list(same.restore(state)) == []
        assert same.take(5) == source(*places).take(8)[3:]


class TestCompressed:
    CONTENT = b'{"prompt": "p 0", "label": "1"}\n\n{"prompt": "p 1", "label": "1"}\n'

    def write(self, path: Path, content: bytes) -> str:
        compress = gzip.compress if path.suffix == ".gz" else zstandard.ZstdCompressor().compress
        half = len(content) // 2
        path.write_bytes(compress(content[:half]) + compress(content[half:]))  # two parts, as pigz and pzstd write
        return str(path)

    @pytest.fixture(params=["t.jsonl.gz", "t.jsonl.zst"])
    def path(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return tmp_path / request.param

    def test_is_read_as_if_it_were_not(self, path: Path) -> None:
        plain = path.with_suffix("")
        plain.write_bytes(self.CONTENT)
        packed, unpacked = source(self.write(path, self.CONTENT)), source(str(plain))
        assert texts(packed.take(4)) == texts(unpacked.take(4))
        assert packed.take(1)[0][1].prompt_id in (f"{path.name}:1", f"{path.name}:3")
        assert packed.state()["digest"] == unpacked.state()["digest"]

    def test_a_broken_row_is_named(self, path: Path) -> None:
        with pytest.raises(DataError, match=rf"{path.name}:3: not valid JSON"):
            source(self.write(path, b'{"prompt": "p 0", "label": "1"}\n\n{\n'))

    @pytest.mark.parametrize("broken", [b"no compression", None])
    def test_broken_compression(self, path: Path, broken: bytes | None) -> None:
        content = Path(self.write(path, self.CONTENT * 1000)).read_bytes()
        path.write_bytes(content[: len(content) // 3] if broken is None else broken)
        with pytest.raises(DataError, match=rf"{path.name}: cannot read prompt data"):
            source(str(path))

"""Whatever the arguments are, ``--print-config`` and the command line say them so that they read back equal."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from miles_async.arguments.argument_files import expand_argument_files
from miles_async.arguments.config_file import to_toml
from miles_async.arguments.foreign import FOREIGN_VALUES
from miles_async.arguments.parser import assemble, parse_arguments
from miles_async.arguments.specification import LARGEST_WHOLE, FlagSpecification, flag_specifications

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = {int: st.integers(-LARGEST_WHOLE, LARGEST_WHOLE), float: st.floats(allow_nan=False, allow_infinity=False)}


def values_of(specification: FlagSpecification) -> st.SearchStrategy[object]:
    if specification.choices:
        values: st.SearchStrategy[object] = st.sampled_from(specification.choices)
    elif specification.kind is bool:
        values = st.booleans()
    elif specification.kind in NUMBERS:
        values = NUMBERS[specification.kind]
    else:  # "none" is taken, argparse drops "--", "~" is expanded, and a path that begins with "$" is refused
        values = TEXTS.filter(lambda text: text.lower() not in ("none", "--") and not text.startswith("~"))
        # Hypothesis draws words of the sources, too: a value of another system is read as ours.
        values = values.filter(lambda text: (specification.flag, text) not in FOREIGN_VALUES)
        if specification.kind is Path:
            values = values.filter(lambda text: text and not text.startswith("$")).map(Path)
    if specification.many:
        return st.lists(values, max_size=3).map(tuple)
    return values | st.none() if specification.optional else values


ARGUMENTS = st.fixed_dictionaries({}, optional={name: values_of(flag) for name, flag in flag_specifications().items()})
WORDS = st.text("abc019._/", min_size=1, max_size=6)
PASSED = st.dictionaries(
    st.sampled_from(["--sglang-a-b", "--sglang-c", "--router-d"]), st.lists(WORDS, max_size=3).map(tuple)
)


@given(ARGUMENTS, PASSED)
def test_printed_config_reads_back_equal(values: dict[str, object], passed: dict[str, tuple[str, ...]]):
    arguments = assemble(values, passed)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.toml"
        path.write_text(to_toml(arguments), encoding="utf-8", newline="")
        assert parse_arguments(["--config", str(path)]).arguments == arguments


def as_words(specification: FlagSpecification, value: object) -> list[str]:
    if specification.kind is bool and value is None:  # neither was said
        return []
    if specification.kind is bool:
        return [specification.flag if value else specification.negated_flag]
    return [f"{specification.flag}={'none' if value is None else value}"]


@given(ARGUMENTS, PASSED)
def test_command_line_reads_back_equal(values: dict[str, object], passed: dict[str, tuple[str, ...]]):
    specifications = flag_specifications()
    values = {name: value for name, value in values.items() if not specifications[name].many}
    words = [word for name, value in values.items() for word in as_words(specifications[name], value)]
    words += [word for flag, items in passed.items() for word in (flag, *items)]
    assert parse_arguments(words).arguments == assemble(values, passed)


@given(st.lists(st.text(st.characters(exclude_categories=["C"]), max_size=8)))
def test_quoted_words_of_a_file_are_read_exactly(words: list[str]):
    words = [word for word in words if not word.startswith("@")]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.args"
        path.write_text("# all words\n" + " ".join(map(shlex.quote, words)) + "  # end 'of it\n", encoding="utf-8")
        assert expand_argument_files([f"@{path}"]) == words

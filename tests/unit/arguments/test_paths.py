"""Workers on other nodes have another working directory."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import get_args, get_type_hints

from miles_async.arguments import Arguments
from miles_async.arguments.parser import assemble
from miles_async.wiring.driver_process import with_absolute_paths


def test_every_path_becomes_absolute_and_nothing_else_changes() -> None:
    relative = assemble(
        {
            "hf_checkpoint": Path("model"),
            "prompt_data": ("math", "/data/p.jsonl", "saved/math-1.1/", "hf:openai/gsm8k:main:train"),
            "lr": 0.5,
            "eval_prompt_data": ("aime", "a.jsonl", "/data/b.parquet"),
        },
        {},
    )
    absolute = with_absolute_paths(relative)
    assert absolute.model.hf_checkpoint == Path.cwd() / "model"
    saved = f"{Path.cwd()}/saved/math-1.1/"
    assert absolute.data.prompt_data == ("math", "/data/p.jsonl", saved, "hf:openai/gsm8k:main:train")
    assert with_absolute_paths(absolute) == absolute
    assert absolute.evaluation.eval_prompt_data == ("aime", str(Path.cwd() / "a.jsonl"), "b", "/data/b.parquet")
    assert absolute.observability.run_dir.is_absolute()
    assert absolute.optimizer == relative.optimizer
    assert absolute.checkpoint.save is None


def test_every_flag_that_takes_a_path_is_made_absolute() -> None:
    arguments = Arguments()
    for group_field in fields(arguments):
        group = getattr(arguments, group_field.name)
        paths = [name for name, hint in get_type_hints(type(group)).items() if Path in (hint, *get_args(hint))]
        given = replace(arguments, **{group_field.name: replace(group, **dict.fromkeys(paths, Path("here")))})
        found = getattr(with_absolute_paths(given), group_field.name)
        assert {name: getattr(found, name) for name in paths} == dict.fromkeys(paths, Path.cwd() / "here")


def test_texts_that_are_paths_are_made_absolute() -> None:
    given = {"prompt_data": ("p.jsonl",), "image_root": Path("pictures"), "pass_rates": ("runs/a", "/runs/b")}
    found = with_absolute_paths(assemble(given | {"environment_python": "verifiers/bin/python"}, {}))
    assert found.data.image_root == Path.cwd() / "pictures"
    assert found.data.pass_rates == (f"{Path.cwd()}/runs/a", "/runs/b")
    assert found.sessions.environment_python == f"{Path.cwd()}/verifiers/bin/python"
    on_path = with_absolute_paths(assemble({"environment_python": "python3"}, {}))
    assert on_path.sessions.environment_python == "python3"

"""Workers on other nodes have another working directory."""

from __future__ import annotations

from pathlib import Path

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

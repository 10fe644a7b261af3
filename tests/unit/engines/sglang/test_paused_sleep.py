"""The patch that lets paused schedulers sleep is still needed; test_engines_real.py shows what it does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from miles_async.engines.sglang.patches import PAUSED_TURN


def test_sglang_still_lets_a_paused_scheduler_spin() -> None:
    sglang = find_spec("sglang")
    assert sglang is not None
    assert sglang.origin is not None
    source = Path(sglang.origin).with_name("srt").joinpath("managers", "scheduler.py").read_text()
    loop = source.partition("def event_loop_normal(")[2].partition("def ")[0]
    paused = loop.partition("if self._engine_paused:")[2].partition("continue")[0]
    assert paused.split() == [f"self.{PAUSED_TURN}()"]
    assert "sleep" not in source.partition(f"def {PAUSED_TURN}(")[2].partition("def ")[0]

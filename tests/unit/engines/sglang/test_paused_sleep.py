"""The patch that lets paused schedulers sleep is still needed; test_engines_real.py shows what it does."""

from __future__ import annotations

from miles_async.engines.sglang.patches import PAUSED_TURN
from tests.sglang_source import module_source


def test_sglang_still_lets_a_paused_scheduler_spin() -> None:
    source = module_source("sglang.srt.managers.scheduler")
    loop = source.partition("def event_loop_normal(")[2].partition("def ")[0]
    paused = loop.partition("if self._engine_paused:")[2].partition("continue")[0]
    assert paused.split() == [f"self.{PAUSED_TURN}()"]
    assert "sleep" not in source.partition(f"def {PAUSED_TURN}(")[2].partition("def ")[0]

"""The recorder of a run's samples, by its flags."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from miles_async.arguments import ObservabilityArguments
from miles_async.prompts.templates import ChatTemplate
from miles_async.wiring.run_samples import sample_recorder
from tests.fakes.text_of_tokens import TextOfTokens

TEMPLATE = cast(ChatTemplate, TextOfTokens(lambda ids: f"{len(ids)} tokens"))


def test_without_groups_nothing_is_recorded(tmp_path: Path) -> None:
    assert sample_recorder(ObservabilityArguments(run_dir=tmp_path, save_samples=0), TEMPLATE) is None

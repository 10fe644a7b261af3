"""Settings of servers from flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.server_groups import ServerGroup
from miles_async.runtime.keys import EngineKeys, Secret
from miles_async.wiring.engines import ForkedEngines, _StackMaker, server_spec


@pytest.mark.parametrize(("role", "published"), [("train", True), ("evaluation", True), ("frozen", False)])
def test_only_frozen_engines_start_with_the_weights_of_their_checkpoint(
    role: Any, published: bool, tmp_path: Path
) -> None:
    # covers: C8
    spec = server_spec(Arguments(), ServerGroup(name="group", role=role), tmp_path, "cpu")
    assert (spec.dummy_weights, spec.held_weights) == (published, published)


@pytest.mark.parametrize(("external", "streams"), [((), True), (("10.0.0.1:30000",), False)])
def test_only_engines_that_we_start_receive_a_publication_by_one_call(
    external: tuple[str, ...], streams: bool, tmp_path: Path
) -> None:
    # covers: C8
    keys = EngineKeys(api=Secret("a"), admin=Secret("b"))
    maker = _StackMaker(Arguments(), tmp_path, "cpu", keys, ForkedEngines())
    assert maker._group(ServerGroup(name="group", role="train", external=external)).streams is streams

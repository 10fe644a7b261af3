"""Flags of SGLang's, from the command line and from a file of groups, are judged as each engine gets them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.engines import EnginesArguments
from miles_async.runs.checks import passed_on_problems

REPLICAS = "SGLang updates no engine that has several replicas: the run takes more engines instead; leave it out"


@pytest.mark.parametrize(
    ("shared", "own", "refused"),
    [
        (("--enable-dp-attention",), "{ dp-size = 2 }", ()),
        (("--dp-size", "2"), "{ enable-dp-attention = true }", ()),
        ((), "{ dp-size = 2 }", ("[groups.big.sglang] dp-size",)),
        (("--enable-dp-attention",), "{ enable-dp-attention = false, dp-size = 2 }", ("[groups.big.sglang] dp-size",)),
        (("--enable-dp-attention", "--dp-size=2"), "{ enable-dp-attention = false }", ("--sglang-dp-size",)),
        (("--grpc-port", "1"), "{ grpc-port = 2 }", ("--sglang-grpc-port", "[groups.big.sglang] grpc-port")),
        (("--grpc-port", "1"), "{ grpc-port = false }", ()),
    ],
)
def test_groups_and_flags_of_all_engines_are_read_together(
    shared: tuple[str, ...], own: str, refused: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f"[groups.big]\nsglang = {own}\n")
    engines = EnginesArguments(server_groups=file, sglang_extra=shared)
    problems = list(passed_on_problems(replace(Arguments(), engines=engines)))
    assert [problem.removeprefix(f"--server-groups {file}: ").split(": ")[0] for problem in problems] == [*refused]
    assert all(REPLICAS in problem for problem in problems if "dp-size" in problem)

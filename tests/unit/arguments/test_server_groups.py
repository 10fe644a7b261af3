"""Groups of engines: the file, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.cluster_checks import check_engine_sizes
from miles_async.arguments.parser import assemble
from miles_async.arguments.server_groups import (
    ServerGroup,
    check_server_groups,
    of_role,
    pinned_versions,
    read_server_groups,
    server_groups,
)
from miles_async.errors import ConfigurationError
from miles_async.weights.staging_options import StagingOptions

CANARY = {"verify_weights": "canary"}
FLEET = """
[groups.small]
engines = 6
[groups.big]
gpus_per_engine = 4
engines = 2
sglang = { mem-fraction-static = 0.8, enable-metrics = true, disable-x = false }
[groups.test]
role = "evaluation"
[groups.judge]
role = "frozen"
model = "/models/judge"
port = 8400
"""
EVALUATED = '[groups.a]\n[groups.b]\nrole = "evaluation"'
EXTERNAL = '[groups.a]\nexternal = ["a:1"]'


def with_fleet(tmp_path: Path, content: str, **flags: object) -> Arguments:
    path = tmp_path / "fleet.toml"
    path.write_text(content)
    return assemble({"server_groups": path, "eval_prompt_data": ("test.jsonl",), **flags}, {})


def test_a_fleet_of_all_kinds(tmp_path: Path) -> None:
    arguments = with_fleet(tmp_path, FLEET)
    assert list(check_server_groups(arguments)) == []
    groups = server_groups(arguments)
    assert [(g.name, g.num_engines, g.gpus_per_engine) for g in of_role(groups, "train")] == [
        ("small", 6, 1),
        ("big", 2, 4),
    ]
    assert groups[1].sglang_extra == ("--mem-fraction-static=0.8", "--enable-metrics")
    assert [g.name for g in of_role(groups, "evaluation")] == ["test"]
    assert of_role(groups, "frozen") == (ServerGroup(name="judge", role="frozen", model="/models/judge", port=8400),)


def test_an_evaluation_with_engines_of_its_own_keeps_a_version(tmp_path: Path) -> None:
    # covers: P5
    assert (pinned_versions(Arguments()), pinned_versions(with_fleet(tmp_path, FLEET))) == (1, 2)
    assert StagingOptions(bucket_bytes=1, version_bytes=1, pinned=2).room == 4


def test_a_group_drops_a_flag_of_all_engines_that_it_makes_false(tmp_path: Path) -> None:
    arguments = with_fleet(tmp_path, FLEET)
    words = ("--disable-x", "--cuda-graph-bs-decode", "1", "-1", "--mem-fraction-static=0.7")
    arguments = replace(arguments, engines=replace(arguments.engines, sglang_extra=words))
    small, big, *_ = server_groups(arguments)
    assert small.all_extra(arguments) == words
    assert big.all_extra(arguments) == (*words[1:], "--mem-fraction-static=0.8", "--enable-metrics")


def test_without_a_file_there_is_one_group_by_flags() -> None:
    assert server_groups(assemble({"rollout_num_gpus": 4}, {})) == (ServerGroup(name="engine", engines=4),)
    flags = {"rollout_external": ("a:30000", "b:30000"), "rollout_num_gpus": 4, **CANARY}
    external = assemble(flags, {})
    assert [group.num_engines for group in server_groups(external)] == [2]
    assert list(check_server_groups(external)) == []
    wide = assemble({**flags, "rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 4}, {})
    assert [*check_server_groups(wide), *check_engine_sizes(wide)] == []


def test_sizes_by_flags_are_not_judged_next_to_a_file() -> None:
    odd = {"rollout_num_gpus_per_engine": 3, "rollout_num_nodes_per_engine": 2}
    assert len(list(check_engine_sizes(assemble(odd, {})))) == 2
    assert list(check_engine_sizes(assemble({**odd, "server_groups": Path("fleet.toml")}, {}))) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[groups.a]\nengine = 2", r"fleet.toml: \[groups.a\]: .*unknown field `engine`"),
        ('[groups.a]\nengines = "2"', r"\[groups.a\]: Expected `int`, got `str` - at `\$.engines`"),
        ('[groups.a]\nrole = "eval"', r"\[groups.a\]: Invalid enum value 'eval'"),
        ("[groups.a\n", r"fleet.toml: .*line 1"),
        ('[groups.a]\nsglang = { api-key = "x" }', r"\[groups.a\]: sglang may not have api-key: .*MILES_ASYNC_API_KEY"),
        ("[fleet.a]\n", r"expected tables \[groups.NAME\], found fleet"),
    ],
)
def test_a_mistake_is_named_with_file_and_table(tmp_path: Path, content: str, message: str) -> None:
    arguments = with_fleet(tmp_path, content)
    with pytest.raises(ConfigurationError, match=message):
        server_groups(arguments)
    (problem,) = check_server_groups(arguments)
    assert "--server-groups" in problem


def test_a_file_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--server-groups .*absent.toml: .*No such file"):
        read_server_groups(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ('[groups.a]\nrole = "frozen"', {}, 'at least one group with role = "train"'),
        ("[groups.A-b]\n", {}, "group 'A-b': expected a name of small letters"),
        ("[groups.a]\nengines = 0", {}, "group a: expected at least one engine"),
        ('[groups.a]\nmodel = "m"', {}, 'model and port are for groups with role = "frozen", not train'),
        ('[groups.a]\nexternal = ["a"]', CANARY, "expected external engines as host:port, found 'a'"),
        (EXTERNAL + "\nsglang = { x = 1 }", CANARY, "external engines are up already"),
        (EVALUATED, {"eval_prompt_data": None}, "a group for evaluation, and no --eval-prompt-data"),
        (EVALUATED, {"agent_path": "a:b"}, "agents always talk to the engines of training"),
        (EXTERNAL, {}, "external engines with --verify-weights full: only servers that we start"),
        (EXTERNAL, {"verify_weights": "sample"}, "external engines with --verify-weights sample"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, content: str, flags: dict[str, object], message: str) -> None:
    # covers: C3
    (problem,) = check_server_groups(with_fleet(tmp_path, content, **flags))
    assert message in problem


def test_external_engines_are_named_in_one_place(tmp_path: Path) -> None:
    (problem,) = check_server_groups(with_fleet(tmp_path, FLEET, rollout_external=("a:1",)))
    assert "write `external = [...]` in the file" in problem

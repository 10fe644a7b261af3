"""Processes of a run that are forked from one that has imported what they need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.wiring.engines import engine_imports
from miles_async.wiring.trainer_process import rank_imports

CPU = Arguments(cluster=replace(Arguments().cluster, device="cpu"))


def test_on_cpu_engines_and_ranks_are_forked(tmp_path: Path) -> None:
    assert engine_imports(CPU, tmp_path, "cpu", tmp_path / "socket", {}) is not None
    ranks = rank_imports(CPU, tmp_path, "cpu", tmp_path / "socket", {})
    assert ranks is not None
    assert str(tmp_path / "socket") in ranks.interpreter("a title")


def test_on_cuda_nothing_is_forked(tmp_path: Path) -> None:
    assert engine_imports(CPU, tmp_path, "cuda", tmp_path / "socket", {}) is None
    assert rank_imports(CPU, tmp_path, "cuda", tmp_path / "socket", {}) is None


def test_external_engines_are_not_forked(tmp_path: Path) -> None:
    external = replace(CPU, engines=replace(CPU.engines, rollout_external=("host:1",)))
    assert engine_imports(external, tmp_path, "cpu", tmp_path / "socket", {}) is None


@pytest.mark.parametrize("section", [{"cluster": {"ray_address": "auto"}}, {"model": {"train_backend": "another"}}])
def test_ranks_of_a_cluster_or_another_backend_are_not_forked(
    tmp_path: Path, section: dict[str, dict[str, str]]
) -> None:
    [(name, changed)] = section.items()
    arguments = replace(CPU, **{name: replace(getattr(CPU, name), **changed)})
    assert rank_imports(arguments, tmp_path, "cpu", tmp_path / "socket", {}) is None

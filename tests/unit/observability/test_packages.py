"""Packages of trackers that are not installed are named before anything starts."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability import packages
from miles_async.observability.packages import EXTRAS, missing_packages


@pytest.mark.parametrize(("field", "extra"), EXTRAS.items())
def test_a_package_that_is_not_installed_is_one_line_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, field: str, extra: str
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    [line] = missing_packages(ObservabilityArguments(**{field: True}))
    assert line.startswith(f"--{field.replace('_', '-')}: expected the package {extra}")
    assert line.endswith(f"pip install 'miles-async[{extra}]'")


@pytest.mark.parametrize("field", EXTRAS)
def test_an_installed_package_or_an_unused_one_is_no_problem(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    assert not list(missing_packages(ObservabilityArguments()))
    monkeypatch.setattr(packages, "find_spec", lambda name: ModuleSpec(name, None))
    assert not list(missing_packages(ObservabilityArguments(**{field: True})))

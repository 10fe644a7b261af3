"""docs/families.md is what the table of the tests' cases says, and every family that is trained is in it."""

from __future__ import annotations

from miles_async.backends.megatron.families.known import FAMILIES, REFUSED
from scripts.families_page import COLUMNS, PAGE, page
from tests.integration.family_table import COMPARED, DEEPER, EVERY_DAY, SERVED, SERVED_AT_NIGHT
from tests.integration.tiny_models import FAMILIES as TINY_MODELS
from tests.integration.tiny_models import model_type


def test_the_page_is_current() -> None:
    # covers: M21
    assert PAGE.read_text() == page(), "run .venv/bin/python -m scripts.families_page"


def test_every_family_that_is_trained_is_compared_on_one_rank_and_no_other() -> None:
    assert {model_type(name) for name in COMPARED["one-rank"]} == set(FAMILIES)
    assert not {*FAMILIES} & {*REFUSED}
    assert set(COLUMNS) <= set(COMPARED)


def test_cases_are_of_models_that_there_are() -> None:
    named = {name for models in COMPARED.values() for name in models} | {name for name, _ in SERVED + SERVED_AT_NIGHT}
    assert named <= {*TINY_MODELS, *DEEPER}


def test_cases_of_every_day_are_among_those_of_the_night() -> None:
    assert {(layout, name) for layout in EVERY_DAY for name in EVERY_DAY[layout]} <= {
        (layout, name) for layout in COMPARED for name in COMPARED[layout]
    }

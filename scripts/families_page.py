"""The tables of docs/families.md on the site: which layouts of ranks tests compare, and refused families.

To read them without the site:

    .venv/bin/python -m scripts.families_page
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from miles_async.backends.megatron.families.known import FAMILIES, REFUSED
from tests.integration.family_table import COMPARED, COMPARED_WITH_IMAGES, DEEPER, SERVED, SERVED_AT_NIGHT, WITH_IMAGES
from tests.integration.tiny_models import FAMILIES as TINY_MODELS
from tests.integration.tiny_models import model_type

COLUMNS = {
    "one-rank": "1 rank",
    "tp2-sequence-parallel": "TP 2, SP",
    "tp2": "TP 2",
    "pp2": "PP 2",
    "cp2": "CP 2",
    "ep2": "EP 2",
    "tp2-ep2": "TP 2, EP 2",
}
"""Layouts with a column of their own → heading; the others are listed."""


def _lines() -> Iterator[str]:
    yield from (
        "## Layouts",
        "",
        f"| model_type | tiny model | {' | '.join(COLUMNS.values())} | other layouts | engine |",
    )
    yield "|---|---|" + "---|" * (len(COLUMNS) + 2)
    for kind in FAMILIES:
        for name in (name for name in TINY_MODELS if model_type(name) == kind):
            cells, others = _compared(COMPARED, name)
            engines = [f"TP {ranks}" for served, ranks in (*SERVED, *SERVED_AT_NIGHT) if served == name]
            yield f"| `{kind}` | {name} | {' | '.join([*cells, others, ', '.join(engines)])} |"
    for kind, name in WITH_IMAGES.items():
        cells, others = _compared(COMPARED_WITH_IMAGES, name)
        yield f"| `{kind}` | {name} | {' | '.join([*cells, others])} | TP 1 |"
    yield from ("", "## Refused", "", "| model_type | why, and what to do |", "|---|---|")
    yield from (f"| `{kind}` | {reason} |" for kind, reason in REFUSED.items())
    yield "| any other | it was not compared with transformers |"


def _compared(table: Mapping[str, Sequence[str]], name: str) -> tuple[list[str], str]:
    """Cells of a model's layouts with a column, and the names of its other layouts."""
    cells = ["yes" if name in table[layout] else "" for layout in COLUMNS]
    others = (
        layout
        for layout, models in table.items()
        if layout not in COLUMNS and any(DEEPER.get(model, (model,))[0] == name for model in models)
    )
    return cells, ", ".join(others)


def tables() -> str:
    """Both tables with their headings, in Markdown."""
    return "\n".join(_lines()) + "\n"


if __name__ == "__main__":
    print(tables(), end="")

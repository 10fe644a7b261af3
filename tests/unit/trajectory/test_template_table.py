"""Every family that is trained has a chat template that tests try with calls, or a reason."""

from __future__ import annotations

import re
from pathlib import Path

from miles_async.backends.megatron.families.known import FAMILIES
from tests.integration.template_table import TEMPLATES, WITHOUT_CALLS, WITHOUT_RESULTS, template_file

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"


def test_every_family_has_a_template_or_a_reason() -> None:
    tried = {family for template in TEMPLATES.values() for family in template.families}
    assert tried | {*WITHOUT_RESULTS} | {*WITHOUT_CALLS} == {*FAMILIES}
    assert not tried & {*WITHOUT_RESULTS, *WITHOUT_CALLS}


def test_templates_of_trl_are_installed() -> None:
    for template in TEMPLATES.values():
        assert not template.file or template_file("", template.file).exists()


def test_the_page_lists_families_with_their_parsers() -> None:
    table = PAGE.read_text().partition("| family | chat template of |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]*) \| [^|]* \| `([^`]+)` \| (?:`([^`]+)` )?\|$", table, re.M)
    listed = {(families, calls, reasoning or None) for families, calls, reasoning in rows}
    assert listed == {(", ".join(each.families), each.calls, each.reasoning) for each in TEMPLATES.values()}

"""The site of the pages: every page has one place in the navigation, and every flag is on the page of flags."""

from __future__ import annotations

import re

from miles_async.arguments.specification import flag_specifications
from scripts.docs_site import GENERATED, ROOT, flags_page, pages


def test_every_page_has_one_place_in_the_navigation() -> None:
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    places = re.findall(r"[\w/.-]+\.md$", navigation, flags=re.MULTILINE)
    assert sorted(places) == sorted([*(str(page.relative_to(ROOT)) for page in pages()), *GENERATED])


def test_the_page_of_flags_has_every_flag_once() -> None:
    named = re.findall(r"^### `(?:-h, )?(--[\w-]+)", flags_page(), flags=re.MULTILINE)
    assert len(named) == len(set(named))
    assert {one.flag for one in flag_specifications().values()} <= set(named)

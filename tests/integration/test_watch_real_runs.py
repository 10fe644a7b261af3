"""The page of the quick start: while it is live, after it was killed, and after it has finished."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.page_views import assert_views_show, opened, step_of
from tests.integration.real_run import real_run
from tests.integration.test_watch_page import VIEWS
from tests.integration.watch_browser import CHROMIUM, DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420), pytest.mark.long]


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")
def test_the_page_follows_a_live_run_and_shows_that_it_was_killed(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    with real_run(tmp_path / "run", "--num-rollout", "500", command=imported_reverse) as run:
        run.wait_for_steps(2, 180)
        with opened(run.run_dir) as page:
            for view in VIEWS:
                page.go(f"{view}?run=0")
                assert len(page.text("main")) > 20
            assert "▶ step" in page.text(".chip .state")
            page.go("overview?run=0")
            before = step_of(page)
            page.until(lambda: step_of(page) > before)
            os.kill(run.process.pid, signal.SIGKILL)
            run.wait(30)
            page.until(lambda: page.text(".chip .state") == "✗ killed")
    assert assert_views_show(run.run_dir, ending=None)


def test_the_page_of_a_finished_run_has_the_numbers_of_its_files(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    with real_run(tmp_path / "run", "--num-rollout", "3", command=imported_reverse) as run:
        assert run.wait(300) == 0, run.output
    rows = assert_views_show(run.run_dir)
    assert {row.kind for row in rows} == {"train", "eval"}

"""Pictures of the page of a run for README and docs/watching.md: `make screenshots` (RUN=runs/quickstart).

Needs chromium and chromedriver. A picture is made of every view in VIEWS, in docs/images/watch_NAME.png.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.integration.watch_browser import browser, served

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
VIEWS = {  # name of the picture → (view, height in pixels)
    "overview": ("overview?run=0", 760),
    "metrics": ("metrics?run=0", 900),
    "engines": ("engines?run=0", 800),
}
WIDTH = 1280
DRAWN_SECONDS = 1.0  # after a view is there until its charts are


def main(run_dir: Path) -> None:
    """Write the pictures and print their paths."""
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page, served([run_dir]) as base:
        page.open(base)
        for name, (view, height) in VIEWS.items():
            page.driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False},
            )
            page.go(view)
            time.sleep(DRAWN_SECONDS)
            path = IMAGES / f"watch_{name}.png"
            page.driver.save_screenshot(str(path))
            print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Pictures of the page of a run for README and docs/watching.md: `make screenshots` (RUN=runs/quickstart).

Needs chromium and chromedriver. A picture is made of every view, in docs/images/watch_NAME.png, with a palette: a third
of the bytes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from miles_async.samples.reader import read_summaries, samples_files
from tests.integration.watch_browser import browser, served

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
VIEWS = {  # name of the picture → (view, height in pixels)
    "overview": ("overview?run=0", 760),
    "metrics": ("metrics?run=0", 900),
    "samples": ("samples?run=0&sort=reward&down=1", 560),
    "attempts": ("attempts?run=0", 560),
    "engines": ("engines?run=0", 760),
    "flags": ("flags?run=0&search=staleness", 560),
    "logs": ("logs?run=0&name=*&search=info", 620),
}
TOKENS_HEIGHT = 860
SHADE = "select[aria-label='shade tokens by'] option[value=differences]"
WIDTH = 1280
COLOURS = 128
DRAWN_SECONDS = 1.0  # after a view is there until its charts are


def main(run_dir: Path) -> None:
    """Write the pictures and print their paths."""
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page, served([run_dir]) as base:
        page.open(base)
        for name, (view, height) in {**VIEWS, "tokens": (_oldest_sample(run_dir), TOKENS_HEIGHT)}.items():
            page.driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False},
            )
            page.go(view)
            if name == "tokens":
                page.one(SHADE).click()
            time.sleep(DRAWN_SECONDS)
            path = IMAGES / f"watch_{name}.png"
            page.driver.save_screenshot(str(path))
            with Image.open(path) as picture:
                picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
            print(path)


def _oldest_sample(run_dir: Path) -> str:
    """The view of the sample with the largest age, whose tokens differ most between engine and trainer."""
    files = [file for file in samples_files(run_dir) if file.kind == "train"]
    rows = [row for file in files for row in read_summaries(file.path) if row.age is not None]
    row = max(rows, key=lambda row: (row.age, row.logprob_difference or 0.0))
    return f"samples?run=0&kind=train&step={row.step}&attempt={row.attempt_id}&sample={row.sample}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))

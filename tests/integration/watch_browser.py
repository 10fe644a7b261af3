"""The page of a run in a real browser: a server in a thread, and Chromium without a window."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from miles_async.runtime.network.keys import Secret
from miles_async.watch.run import open_runs
from miles_async.watch.server import make_server

KEY = "read-key"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--disable-dev-shm-usage",
)
TIMEOUT = 20.0  # seconds until what a test waits for must have happened

T = TypeVar("T")


class Page:
    """A tab of the browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, base: str, view: str = "", key: str = KEY) -> None:
        """Open the page afresh; ``view`` such as "samples?run=0", by default the address with the key."""
        self.driver.get("about:blank")
        self.driver.get(f"{base}/#key={key}")
        self.until(lambda: self.shown() == "overview")
        if view:
            self.go(view)

    def go(self, view: str) -> None:
        """Change the view, by the address as links do."""
        # The mark is of the view before, which may be the same one with other parameters.
        self.driver.execute_script(
            "if (location.hash === arguments[0]) return;"
            "document.getElementById('main').dataset.view = ''; location.hash = arguments[0]",
            f"#/{view}",
        )
        self.until(lambda: self.shown() == view.split("?")[0] and view in self.driver.current_url)

    def shown(self) -> str | None:
        """Name of the view that is drawn."""
        return self.driver.execute_script("return document.getElementById('main')?.dataset.view ?? null")

    def text(self, selector: str) -> str:
        """Text of the first element, as a person sees it."""
        return self.until(lambda: [each.text for each in self.all(selector)[:1]])[0]

    def one(self, selector: str) -> WebElement:
        """The first element that fits, once it is there."""
        return self.until(lambda: (self.all(selector) or [None])[0])

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        self.driver.switch_to.active_element.send_keys(key)

    def focused(self) -> WebElement:
        return self.driver.switch_to.active_element

    def until(self, condition: Callable[[], T]) -> T:
        """Wait until ``condition`` returns something true, and return it. Elements may be drawn again meanwhile."""
        end = time.monotonic() + TIMEOUT
        while True:
            with suppress(StaleElementReferenceException):
                if found := condition():
                    return found
            assert time.monotonic() < end, f"not within {TIMEOUT} s; the page shows {self.one_text()!r}"
            time.sleep(0.05)

    def one_text(self) -> str:
        return self.driver.find_element(By.TAG_NAME, "body").text[:2_000]

    def leave(self) -> None:
        """Show an empty page, which does not complain that a server has gone."""
        self.driver.get("about:blank")

    def complaints(self) -> list[str]:
        """What the console has had to say since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]


@contextmanager
def browser(profile: Path, width: int = 1400, height: int = 1000) -> Iterator[Page]:
    """A browser with a new profile. It is ended with the block."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        driver.set_page_load_timeout(TIMEOUT)
        yield Page(driver)
    finally:
        driver.quit()


@contextmanager
def served(directories: Sequence[Path], write_key: str | None = None) -> Iterator[str]:
    """The server of the page for these runs: its address."""
    changing = None if write_key is None else Secret(write_key)
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        server = make_server(open_runs(directories), Secret(KEY), changing)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=TIMEOUT)

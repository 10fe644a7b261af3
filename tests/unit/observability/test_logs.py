"""Logging: readable on the console, JSON lines in the run directory, standard-library loggers alike."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import structlog

from miles_async.observability.logs import close_logging, configure_logging

pytestmark = pytest.mark.usefixtures("restored_logging")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_reach_console_and_file_with_their_fields(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = configure_logging(tmp_path)
    structlog.get_logger("miles_async.weights.publisher").info("published", version=3, where=Path("x"))
    logging.getLogger("some.library").warning("%s apples", 2)
    assert path == tmp_path / "logs" / "driver.log"
    ours, theirs = read(path)
    assert (ours["event"], ours["version"], ours["level"]) == ("published", 3, "info")
    assert ours["logger"] == "miles_async.weights.publisher"
    assert (theirs["event"], theirs["logger"]) == ("2 apples", "some.library")
    console = capsys.readouterr().err
    assert "published" in console
    assert "[weights.publisher]" in console
    assert "version=3" in console


def test_console_level_does_not_silence_the_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = configure_logging(tmp_path, "error")
    structlog.get_logger("a").info("quiet")
    structlog.get_logger("a").debug("quieter")
    assert [row["event"] for row in read(path)] == ["quiet"]
    assert capsys.readouterr().err == ""


def test_exceptions_are_told_in_both(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = configure_logging(tmp_path)
    try:
        raise ValueError("what was found")
    except ValueError:
        structlog.get_logger("a").exception("failed")
    assert read(path)[0]["exception"][0]["exc_value"] == "what was found"
    assert "ValueError: what was found" in capsys.readouterr().err


def test_texts_of_any_length_are_bounded_in_both(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = configure_logging(tmp_path)
    long = "x" * 1_000_000
    log = structlog.get_logger("a")
    log.warning("attempt failed", reason=long, nested={"all": [long]}, error=ValueError(long), pair=(1, 2))
    logging.getLogger("some.library").warning("told: %s", long)
    try:
        raise ExceptionGroup("some", [ValueError(long)])
    except ExceptionGroup as error:
        error.add_note(long)
        log.exception("failed")
    assert path.stat().st_size < 200_000
    console = capsys.readouterr().err
    assert len(console) < 200_000
    assert "characters left out" in console
    first, second, third = read(path)
    assert "characters left out" in first["reason"]
    assert first["pair"] == [1, 2]
    assert second["event"].startswith("told: xxx")
    assert third["exception"][0]["exc_type"] == "ExceptionGroup"


def test_a_second_set_up_replaces_the_first(tmp_path: Path) -> None:
    handlers = len(logging.getLogger().handlers)
    configure_logging(tmp_path / "one", console=False)
    path = configure_logging(tmp_path / "two", name="worker", console=False)
    structlog.get_logger("a").info("once")
    assert (tmp_path / "one" / "logs" / "driver.log").read_text() == ""
    assert len(read(path)) == 1
    close_logging()
    assert len(logging.getLogger().handlers) == handlers

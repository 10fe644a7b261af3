"""The last lines of a file."""

from __future__ import annotations

from pathlib import Path

from miles_async.runtime.texts import last_lines


def test_no_more_than_the_end_of_a_file_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log, 100) == []
    log.write_bytes(b"one\ntwo\nthr\xffee\n\n")
    assert last_lines(log, 100) == ["one", "two", "thr\ufffdee"]
    assert last_lines(log, 10) == ["o", "thr\ufffdee"]

"""Digests of files: the same while they are written and when they are read, in one piece or shared by many readers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_async.runtime.files import digests
from miles_async.runtime.files.digests import DigestedFile, digest_file, joined, read_pieces, split, write_digested

PIECE = 64


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "PIECE_BYTES", PIECE)
        yield


@given(st.lists(st.binary(max_size=3 * PIECE), max_size=6))
def test_a_file_has_one_digest_however_it_is_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, writes: list[bytes]
) -> None:
    directory = tmp_path_factory.mktemp("files")
    with DigestedFile(directory / "written") as file:
        for content in writes:
            file.write(content)
        digest = file.finish()
    assert (directory / "written").read_bytes() == b"".join(writes)
    assert digest == write_digested(directory / "at once", b"".join(writes))
    assert digest == digest_file(directory / "written")
    pieces = split({"written": len(b"".join(writes))})
    shares = [read_pieces(directory, [piece]) for piece in pieces]  # by as many readers
    assert joined(pieces, [piece for share in shares for piece in share]) == {"written": digest}


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_every_flipped_bit_changes_it(tmp_path: Path, size: int) -> None:
    content = bytes(size)
    whole = write_digested(tmp_path / "file", content)
    for place in {0, size // 2, size - 1}:
        for bit in range(8):
            flipped = content[:place] + bytes([1 << bit]) + content[place + 1 :]
            assert write_digested(tmp_path / "file", flipped) != whole


def test_a_shorter_a_longer_and_an_absent_file(tmp_path: Path) -> None:
    whole = write_digested(tmp_path / "file", bytes(2 * PIECE))
    assert write_digested(tmp_path / "file", bytes(2 * PIECE - 1)) != whole
    assert write_digested(tmp_path / "file", bytes(2 * PIECE + 1)) != whole
    with pytest.raises(FileNotFoundError):
        read_pieces(tmp_path, split({"absent": 1}))

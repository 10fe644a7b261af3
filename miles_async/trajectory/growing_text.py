"""Incremental decoding of tokens into text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"  # decoded from an incomplete character
_LONGEST_UNFINISHED = 3  # of these for one character: all of its bytes but the last


class GrowingText:
    """Text of tokens that come one by one: always a prefix of the text of all tokens.

    Decoding everything each time would take quadratic time, and a token alone may have no text: several make a
    character, and some decoders drop a leading space. So the latest tokens are decoded together with those before them.
    What may still be an unfinished character is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode``: of a response with all tokens (``ChatFormat.decode_all``)."""
        self._decode = decode
        self._text = ""  # of the tokens that are read
        self._window: list[int] = []  # the tokens read last, and those that aren't yet
        self._read = 0  # of the window
        self._before = ""  # text of these

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text so far, the new tokens included."""
        self._window += token_ids
        text = self._decode(self._window)
        new = text[len(self._before) :]
        if not new.endswith(_UNFINISHED):
            if new:
                self._text += new
                self._window = self._window[self._read :]
                self._read, self._before = len(self._window), self._decode(self._window)
            return self._text
        return self._text + new[:-_LONGEST_UNFINISHED]

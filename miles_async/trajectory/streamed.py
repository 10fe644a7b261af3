"""A turn that is shown while it is sampled, from tokens that are decoded as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from miles_async.errors import TransientEngineError
from miles_async.trajectory.context import Context
from miles_async.trajectory.messages import Message
from miles_async.trajectory.replies import ReplyParser, extends

_NOTHING: Message = {"role": "assistant", "content": ""}
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
        self._window: list[int] = []  # the tokens read last, then unread ones
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


class StreamedTurn:
    """The reply so far. A ``seams.streams.OnTokens``.

    Tokens come in by calls, and the reply is read from them only when :meth:`advance` asks for it, as often as there is
    time. Tokens that were not shown yet may be retracted.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        """``changed``: called when there may be more to show."""
        self._changed = changed
        self._read: Callable[[str], Message] = lambda text: _NOTHING
        self._decode: Callable[[Sequence[int]], str] = lambda token_ids: ""
        self._trim: Callable[[str], str] = lambda text: text
        self._token_ids: list[int] = []
        self._text = GrowingText(self._decode)
        self._decoded = 0  # tokens that are in the text
        self._seen = 0  # of these, tokens after the text shown last
        self._over = False
        self.shown: Message = _NOTHING

    def begin(self, parser: ReplyParser, context: Context, *, stops: Sequence[str], parallel_calls: bool) -> None:
        """Set how the reply is read: see ``ReplyParser``."""
        self._read = lambda text: parser.certain(
            text, context.text, context.tools, stops=stops, parallel=parallel_calls
        )
        self._decode, self._trim = parser.chat.decode_all, parser.chat.trim
        self._text = GrowingText(self._decode)

    def __call__(self, at: int, token_ids: Sequence[int]) -> None:
        known = self._token_ids[at:]
        if known == [*token_ids[: len(known)]]:
            self._token_ids += token_ids[len(known) :]
        else:
            whole = [*self._token_ids[:at], *token_ids]
            kept = whole[: self._seen] == self._token_ids[: self._seen]
            if not kept and not extends(self._read(self._trim(self._decode(whole))), self.shown):
                raise TransientEngineError(
                    f"an engine threw away what it had sampled after {at} tokens, of which the agent had been streamed "
                    f"the text of {self._seen}"
                )
            self._token_ids, self._decoded = whole, 0
            self._text = GrowingText(self._decode)
        self._changed()

    def advance(self) -> Message | None:
        """Return the reply so far, which counts as shown from then on; None if nothing is new, or the turn is over."""
        if self._over or self._decoded == len(self._token_ids):
            return None
        text = self._text.add(self._token_ids[self._decoded :])
        self._decoded = len(self._token_ids)
        reply = self._read(self._trim(text))
        if reply == self.shown or not extends(reply, self.shown):
            return None
        self.shown, self._seen = reply, self._decoded
        return reply

    def end(self) -> Message:
        """Stop showing; return the shown text."""
        self._over = True
        return self.shown

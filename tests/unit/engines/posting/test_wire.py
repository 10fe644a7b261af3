"""Frames arrive as they were sent, however the socket cuts them."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from miles_async.engines.posting.wire import Frames, Send, ToProcess, Withdraw, frame

HEADS = st.one_of(st.builds(Withdraw), st.builds(Send, st.text(max_size=20), st.text(max_size=20)))
FRAMES = st.lists(st.tuples(st.integers(0, 2**64 - 1), HEADS, st.binary(max_size=300)), max_size=20)


class Recorded(Frames[ToProcess]):
    """Keeps what it receives."""

    def __init__(self) -> None:
        super().__init__(msgspec.msgpack.Decoder(ToProcess))
        self.frames: list[tuple[int, ToProcess, bytes]] = []

    def received(self, number: int, head: ToProcess, body: bytes) -> None:
        self.frames.append((number, head, body))


@given(frames=FRAMES, cuts=st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_frames_arrive_whole_and_in_order(frames: list[tuple[int, ToProcess, bytes]], cuts: list[int]) -> None:
    # covers: A3
    end, stream = Recorded(), b"".join(part for each in frames for part in frame(*each))
    turn = 0
    while stream:
        size = cuts[turn % len(cuts)]
        end.data_received(stream[:size])
        stream, turn = stream[size:], turn + 1
    assert end.frames == frames

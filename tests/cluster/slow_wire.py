"""A slow wire: two network interfaces between which frames take a while, and some are lost.

    python -m tests.cluster.slow_wire FIRST SECOND DELAY_SECONDS LOSS

It makes the interfaces FIRST and SECOND in its network namespace, from where they may be moved to others, says "ready",
and works until it is killed, or one of them is gone. LOSS is the share of frames that are lost. Most kernels have netem
for this; a wire needs /dev/net/tun only.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

_TUNSETIFF = 0x400454CA  # of linux/if_tun.h, like the next two
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_FRAME_BYTES = 65536


class _Frame(NamedTuple):
    due: float  # when it arrives, by the monotonic clock
    end: int  # descriptor of the interface at which it arrives
    content: bytes


def make_interface(name: str) -> int:
    """Make an interface; return the descriptor from which frames that it sends are read, and vice versa."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def carry(first: int, second: int, delay: float, loss: float) -> None:
    """Carry frames between two interfaces. Raises OSError when one of them is gone."""
    chance = random.Random(0)
    opposite = {first: second, second: first}
    under_way: deque[_Frame] = deque()  # all take as long, so that the oldest is due first
    while True:
        wait = max(0.0, under_way[0].due - time.monotonic()) if under_way else None
        for end in select.select([first, second], [], [], wait)[0]:
            content = os.read(end, _FRAME_BYTES)
            if chance.random() >= loss:
                under_way.append(_Frame(time.monotonic() + delay, opposite[end], content))
        while under_way and under_way[0].due <= time.monotonic():
            frame = under_way.popleft()
            with suppress(OSError):  # the interface is down: its cable is cut
                os.write(frame.end, frame.content)


def main() -> None:
    first, second, delay, loss = sys.argv[1:]
    ends = make_interface(first), make_interface(second)
    print("ready", flush=True)
    with suppress(OSError):  # the machine that had the interface is gone
        carry(*ends, float(delay), float(loss))


if __name__ == "__main__":
    main()

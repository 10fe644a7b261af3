"""Stand-in for the streams and events of torch.cuda: queued work runs when the host waits for it, and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest


class FakeGpu:
    """A device with a stream for training, and others as they are made. Time passes while work runs that says so."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.done = {"training": 0, "copies": 0}
        self.training = FakeStream(self, "training")
        self.active = self.training

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the device in place of torch's."""
        monkeypatch.setattr("torch.cuda.Stream", lambda device: FakeStream(self, "copies"))
        monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: self.active)
        monkeypatch.setattr("torch.cuda.stream", self.stream)
        monkeypatch.setattr("torch.cuda.Event", partial(FakeEvent, self))

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.active = stream
        yield
        self.active = self.training

    def launch(self, seconds: float) -> None:
        """Queue a kernel that takes this long."""
        self.active.queue.append(partial(self._pass, seconds))

    def _pass(self, seconds: float) -> None:
        self.seconds += seconds


class FakeStream:
    """A queue of work."""

    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        self.queue: list[Callable[[], object]] = []
        self.ended = {0: gpu.seconds}  # number of items → when they were done

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.gpu)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.append(event.synchronize)

    def synchronize(self) -> None:
        self.run(len(self.queue))

    def run(self, end: int) -> None:
        while self.gpu.done[self.name] < end:
            work = self.queue[self.gpu.done[self.name]]
            self.gpu.done[self.name] += 1
            work()
            self.ended[self.gpu.done[self.name]] = self.gpu.seconds


class FakeEvent:
    """A mark in a stream. As torch's it tells its time once it is reached, and if it was made with timing."""

    def __init__(self, gpu: FakeGpu, enable_timing: bool = False) -> None:
        self._gpu, self._timed = gpu, enable_timing

    def record(self, stream: FakeStream | None = None) -> None:
        self._stream = stream or self._gpu.active
        self._end = len(self._stream.queue)

    def synchronize(self) -> None:
        self._stream.run(self._end)

    def elapsed_time(self, later: FakeEvent) -> float:
        """Milliseconds from this mark to ``later``."""
        return 1e3 * (later._reached() - self._reached())

    def _reached(self) -> float:
        assert self._timed, "made without enable_timing"
        assert self._end in self._stream.ended, "not reached yet"
        return self._stream.ended[self._end]

"""Whatever happens in the pool, the ledger on disk counts the same.

# covers: C2
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given, settings

from miles_async.ledger.reader import AttemptRecord, open_ledger
from miles_async.ledger.writer import LedgerWriter
from miles_async.staleness.attempts import RetryPolicy
from miles_async.staleness.ledger import Outcome
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool, PoolSnapshot
from miles_async.types import Attempt, Group
from tests.property.builders import make_group, make_prompt


class Traffic:
    """Random events of a pool and its trainer, flushed now and then; restarted from its state now and then."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.directory, self.chance = directory, chance
        self.runs = 0
        self.prompts = 0
        self.version = 0
        self.state: PoolSnapshot | None = None
        self.start()

    def start(self) -> None:
        self.runs += 1
        self.path = self.directory / f"{self.runs}.sqlite"
        self.writer = LedgerWriter(self.path)
        self.pool = Pool(
            StalenessPolicy(bound=1, lead_batches=2, batch_size=2, action="recycle"),
            RetryPolicy(max_prompt_attempts=2, max_quarantined_prompts=10**6, recycle_stale=True),
            observers=[self.writer.note],
        )
        if self.state is not None:
            self.pool.restore(self.state, version=self.version)
        self.pool.commit(self.version)
        self.flying: list[Attempt] = []
        self.cut: list[tuple[tuple[Group, ...], int]] = []

    def issue(self) -> None:
        while self.pool.room():
            if self.pool.needs_prompt():
                self.pool.offer(0, make_prompt(f"p{self.prompts}"))
                self.prompts += 1
            self.flying.append(self.pool.issue(self.version))

    def end_one(self) -> None:
        if not self.flying:
            return
        attempt = self.flying.pop(self.chance.randrange(len(self.flying)))
        group = make_group(attempt, [[attempt.issued_version], [attempt.issued_version, self.version]])
        match self.chance.randrange(6):
            case 0:
                self.pool.failed(attempt, "boom", infrastructure=self.chance.random() < 0.5)
            case 1:
                self.pool.filtered(attempt, "zero spread", group if self.chance.random() < 0.5 else None)
            case _:
                self.pool.finished(group)

    def step(self) -> None:
        if not self.cut:
            for attempt_id in self.pool.in_doubt(self.version):
                attempt = next(attempt for attempt in self.flying if attempt.attempt_id == attempt_id)
                known = {0: self.chance.choice([None, attempt.issued_version]), 1: self.version}
                if self.pool.review(attempt_id, known, self.version):
                    self.flying.remove(attempt)
            groups = self.pool.cut(self.version)
            self.cut = [(groups, self.version)] if groups else []
        else:
            self.pool.trained(*self.cut.pop())
            self.version += self.chance.randint(1, 2)
            self.pool.commit(self.version)

    def flush(self) -> None:
        self.writer._locked(self.writer._write)

    def check(self) -> None:
        """Balance against balance, rows against balance."""
        self.flush()
        self.writer._store.compare(self.pool.balance())
        with open_ledger(self.path) as reader:
            records = list(reader._records("ORDER BY attempt_id"))
            carried = reader.carried()
            assert reader.balance() == self.pool.balance()
        counts = Counter(record.outcome for record in records)
        for outcome in Outcome:
            before = carried.balance.ended[outcome] if carried else 0
            assert counts[outcome] + before == self.pool.balance().ended[outcome]
        assert counts[None] == len(self.pool.live())
        for record in records:
            check_life(record)

    def restart(self) -> None:
        self.check()
        self.state = self.pool.snapshot()
        self.writer._store.close()
        self.start()


def check_life(record: AttemptRecord) -> None:
    """A row tells one life, in order."""
    times = [t for t in (record.issued_at, record.finished_at, record.cut_at, record.ended_at) if t is not None]
    assert times == sorted(times)
    assert (record.outcome is None) == (record.ended_at is None)
    assert (record.finished_at is None) == (record.oldest_version is None)
    if record.outcome is Outcome.TRAINED:
        assert record.target_version - record.oldest_version <= 1
        assert record.step is not None
    if record.outcome in (Outcome.STALE_RECYCLED, Outcome.STALE_DROPPED):
        version = record.issued_version if record.oldest_version is None else record.oldest_version
        assert record.target_version - version > 1
        aborted = "aborted at " if record.finished_at is None else ""
        assert record.reason == f"{aborted}age {record.target_version - version}"


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_disk_and_pool_agree(seed: int, restarts: bool) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        traffic = Traffic(Path(directory), chance)
        for _ in range(250):
            chance.choice([traffic.issue, traffic.end_one, traffic.end_one, traffic.end_one, traffic.step])()
            if chance.random() < 0.1:
                traffic.flush()
            if restarts and chance.random() < 0.02:
                traffic.restart()
        traffic.check()
        traffic.pool.cancel_all()
        traffic.check()
        traffic.writer._store.close()

"""Records of a simulation: its event log, steps, and the fate of tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from miles_async.staleness.events import Cut, Ended, Finished, Issued, PoolEvent, Trimmed
from miles_async.staleness.ledger import Outcome
from miles_async.staleness.pool import Pool
from miles_async.types import Group, Publication


class EventLog:
    """Lines "SECONDS KIND name=value ...", in virtual seconds: same settings and seed, same bytes."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.lines: list[str] = []
        self._enabled = enabled

    def add(self, kind: str, **fields: object) -> None:
        if self._enabled:
            values = "".join(f" {name}={value}" for name, value in fields.items())
            self.lines.append(f"{asyncio.get_running_loop().time():.6f} {kind}{values}")

    def text(self) -> bytes:
        return "".join(line + "\n" for line in self.lines).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One trained step, with its publication if there was one."""

    step: int
    ended: float  # virtual seconds
    wait_seconds: float  # of the trainer, for its batch
    train_seconds: float
    ages: Mapping[int, int]
    concurrency_limit: int  # samples that could be under way when its batch was cut
    groups: Mapping[str, int]  # the ledger's balance when it ended
    untrained: Mapping[str, float]  # groups that ended otherwise since the batch before was cut, by how they did


class PoolRecorder:
    """Logs pool events, and follows the lengths of responses until their attempts end."""

    def __init__(self, log: EventLog, lead: Callable[[], int]) -> None:
        """``lead``: returns the current lead of the pool."""
        self.generated: Counter[int] = Counter()  # tokens of a response → samples of finished groups
        self.trained: Counter[int] = Counter()  # of trained groups
        self.max_lead = 0
        self._log = log
        self._lead = lead
        self._waiting: dict[int, list[int]] = {}  # attempt → lengths of its group, until it ends

    def note(self, event: PoolEvent) -> None:
        """Record an event; a ``PoolObserver``."""
        match event:
            case Issued(attempt):
                self.max_lead = max(self.max_lead, self._lead())
                self._log.add("issued", attempt=attempt.attempt_id, prompt=attempt.prompt.prompt_id, lead=self._lead())
            case Finished(group):
                self.generated.update(self._wait(group))
                self._log.add("finished", attempt=group.attempt.attempt_id, oldest=group.oldest_version)
            case Trimmed(group, left_out):
                self._wait(group)
                self._log.add("trimmed", attempt=group.attempt.attempt_id, left_out=left_out)
            case Cut(attempt_ids, target_version):
                self._log.add("cut", version=target_version, attempts=",".join(map(str, attempt_ids)))
            case Ended(attempt_id, outcome):
                lengths = self._waiting.pop(attempt_id, [])
                if outcome is Outcome.TRAINED:
                    self.trained.update(lengths)
                self._log.add("ended", attempt=attempt_id, outcome=outcome)

    def _wait(self, group: Group) -> list[int]:
        lengths = [sample.longest_response for sample in group.samples]
        self._waiting[group.attempt.attempt_id] = lengths
        return lengths


class Recording:
    """The controller's Recorder. Checks conservation (C2) at every step, against the pool's contents."""

    def __init__(self, pool: Pool, log: EventLog) -> None:
        self.steps: list[Step] = []
        self.publications: list[tuple[float, Publication]] = []  # when it was committed
        self._pool = pool
        self._log = log

    def step(self, step: int, metrics: Mapping[str, float], ages: Mapping[int, int]) -> None:
        self._pool.check()
        record = Step(
            step=step,
            ended=asyncio.get_running_loop().time(),
            wait_seconds=metrics["time/wait_seconds"],
            train_seconds=metrics["time/train_seconds"],
            ages=dict(ages),
            concurrency_limit=int(metrics["rollout/concurrency_limit"]),
            groups=self._pool.balance().summary(),
            untrained={
                name.removeprefix("groups/"): count for name, count in metrics.items() if name.startswith("groups/")
            },
        )
        self.steps.append(record)
        shown = ",".join(f"{age}:{count}" for age, count in sorted(ages.items()))
        self._log.add("step", step=step, waited=f"{record.wait_seconds:.6f}", ages=shown, lead=self._pool.lead())

    def publication(self, record: Publication) -> None:
        self.publications.append((asyncio.get_running_loop().time(), record))
        self._log.add("published", version=record.version, engines=len(record.engines), fenced=len(record.fenced))

    def checkpoint(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log.add("evaluated", step=step)

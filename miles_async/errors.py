"""The one exception tree. Messages say what was expected, what was found and which flag to change.

ValueError-like problems of users derive from :class:`ConfigurationError` or :class:`DataError`;
``assert`` is for invariants. All are picklable, since they cross Ray actors.
"""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2  # flags or data cannot work, nothing was started
EXIT_INTERRUPTED = 130


class MilesAsyncError(Exception):
    """Base of everything this project raises on purpose."""


class ConfigurationError(MilesAsyncError):
    """A flag, file or combination of them that cannot work. Raised before anything starts."""


class DataError(MilesAsyncError):
    """Prompt data that cannot be used; names the file and the line."""


class EngineError(MilesAsyncError):
    """An inference engine misbehaved."""


class EngineTimeoutError(EngineError):
    """An inference engine gave no answer within a deadline."""


class EngineStartError(EngineError):
    """A server process did not come up in time; carries its last log lines in the message."""


class TransientEngineError(EngineError):
    """The request may succeed on another try or another engine (connection cut, 429, 503, ...)."""


class RequestRejectedError(EngineError):
    """The engine says that the request itself is wrong (400): retrying cannot help."""


class TrajectoryError(RequestRejectedError):
    """Messages that cannot be tokenized, or whose tokens differ from the trajectory's (M14)."""


class NoRoomError(TrajectoryError):
    """The conversation has as many tokens as a sample may have, so there is no room for a response."""


class VersionUnknownError(EngineError):
    """The engine reported no usable weight version: an error for that sample, never "fresh" (C1)."""


class RewardError(MilesAsyncError):
    """The reward function failed for one sample: costs that sample's attempt, not the run."""


class UserCodeError(MilesAsyncError):
    """User code raised a BaseException, such as CancelledError or SystemExit: costs its attempt, not the run."""


class ServiceUnavailableError(MilesAsyncError):
    """A service that a reward, environment or agent needs is down. Hooks may raise it: it says nothing about the
    sample, and the call is repeated when the service is back (C6).
    """


class OverdueError(ServiceUnavailableError):
    """User code missed its deadline: blamed on its service if that answers no other call, otherwise on the code."""


class ServiceOutageError(MilesAsyncError):
    """A service was down for longer than ``--service-outage-timeout``: the run ends."""


class PublicationError(MilesAsyncError):
    """No engine could be brought to the version that was to be published."""


class TrainerError(MilesAsyncError):
    """A trainer rank failed."""


class ProcessLostError(MilesAsyncError):
    """A process that the run cannot do without died or is out of reach. The fault is with machines rather than with
    flags, data or code, so the same run may succeed on another try.
    """


class StaleCallError(MilesAsyncError):
    """A repeated call came after its caller had given it up. Nobody waits for its answer."""


class CheckpointError(MilesAsyncError):
    """A checkpoint could not be written or is not whole."""


class LedgerError(MilesAsyncError):
    """The ledger on disk could not be written or read."""


class ScheduleError(MilesAsyncError):
    """The recorded schedule of a run could not be written or read."""


class SummaryError(MilesAsyncError):
    """The run is over, and its summary could not be written."""


class RunDirectoryError(MilesAsyncError):
    """The run directory was removed, moved or replaced during the run."""


class ReplayDifference(MilesAsyncError):
    """A replay did not decide what the run had decided."""


class ContractViolation(MilesAsyncError):
    """A contract (C1 staleness, C2 conservation, C12 what the optimizer sees) does not hold. Always a bug: the run
    stops.
    """


class StalledError(MilesAsyncError):
    """A wait passed its deadline; the message names who waits for whom (C10)."""


def by_name(name: str) -> type[MilesAsyncError] | None:
    """Class of this tree with that name, as another process reported it; None if there is none.

    >>> by_name("EngineError")
    <class 'miles_async.errors.EngineError'>
    """
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, MilesAsyncError) else None


def first_error(error: BaseException) -> BaseException:
    """The error that a task group failed with: exception groups unwrapped, cancellations passed over.

    >>> first_error(ExceptionGroup("unhandled errors", [EngineError("engine-0 is gone")]))
    EngineError('engine-0 is gone')
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

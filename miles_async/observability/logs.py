"""Logging: structlog over the standard library; readable on the console, JSON lines in the run directory.

Modules have ``log = structlog.get_logger(__name__)`` and log events with fields. Messages of libraries that use the
standard ``logging`` take the same path.
"""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import IO, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, Processor

from miles_async.arguments.observability import LogLevel
from miles_async.runtime.texts import shortened

NOISY_LIBRARIES = ("asyncio", "filelock", "fsspec", "httpcore", "httpx", "matplotlib", "PIL", "urllib3", "wandb")

_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.ExtraAdder(),
    structlog.processors.StackInfoRenderer(),
)

FIELD_LIMIT = 16_000  # characters of a text in a log; room for a traceback or the last lines of a server's log

# Without local variables, which may hold keys, or an environment with tokens.
_TRACEBACKS = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)


class _CurrentStderr(logging.StreamHandler):
    """Writes to the current ``sys.stderr``, which the live display replaces while it runs."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> IO[str]:  # type: ignore[override]
        return sys.stderr


class _RunFile(logging.FileHandler):
    """Log file that reports the first failed write only; logging would print a traceback for each."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            print(f"{self.baseFilename} cannot be written: {sys.exception()}", file=sys.stderr)


def configure_logging(run_dir: Path, level: LogLevel = "info", *, name: str = "driver", console: bool = True) -> Path:
    """Set up logging of this process and return ``<run_dir>/logs/<name>.log``. The last call counts.

    ``level`` is the console's; the file has info and above, or debug with it.
    """
    path = run_dir / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    severity = logging.getLevelNamesMapping()[level.upper()]
    handlers: list[logging.Handler] = [_file_handler(path, min(severity, logging.INFO))]
    if console:
        handlers.append(_console_handler(severity))
    close_logging()
    root = logging.getLogger()
    root.setLevel(min(handler.level for handler in handlers))
    for handler in handlers:
        root.addHandler(handler)
    for library in NOISY_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # so that a second call reaches loggers made before it
    )
    return path


def close_logging() -> None:
    """Flush, close and remove the handlers that :func:`configure_logging` added."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if getattr(handler, "_miles_async", False)]:
        root.removeHandler(handler)
        handler.close()


def _file_handler(path: Path, level: int) -> logging.Handler:
    handler = _RunFile(path, encoding="utf-8")
    renderers = (
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(_TRACEBACKS),
        _shorten_texts,
        structlog.processors.JSONRenderer(default=str),
    )
    return _ours(handler, level, renderers)


def _console_handler(level: int) -> logging.Handler:
    colors = sys.stderr.isatty()
    renderers = (
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        _short_logger_name,
        _shorten_texts,
        structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0, exception_formatter=_short_traceback),
    )
    return _ours(_CurrentStderr(), level, renderers)


def _ours(handler: logging.Handler, level: int, renderers: tuple[Processor, ...]) -> logging.Handler:
    handler.setLevel(level)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    handler._miles_async = True  # type: ignore[attr-defined]
    return handler


def _short_logger_name(_logger: object, _method: str, event: EventDict) -> EventDict:
    """``miles_async.weights.publisher`` → ``weights.publisher``: loggers of the project share the prefix."""
    if (name := event.get("logger")) is not None:
        event["logger"] = name.removeprefix("miles_async.")
    return event


def _shorten_texts(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Bound every text of an event: users' code may raise errors of any length, and libraries log them."""
    return {name: value if name == "exc_info" else _short(value) for name, value in event.items()}


def _short(value: object) -> object:
    if isinstance(value, BaseException):
        return value if len(str(value)) <= FIELD_LIMIT else shortened(str(value), FIELD_LIMIT)
    if isinstance(value, str):
        return shortened(value, FIELD_LIMIT)
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if type(value) is list:
        return [_short(item) for item in value]
    return tuple(_short(item) for item in value) if type(value) is tuple else value


def _short_traceback(out: TextIO, error: ExcInfo) -> None:
    """Write a traceback as structlog does, shortened."""
    whole = io.StringIO()
    structlog.dev.plain_traceback(whole, error)
    out.write(shortened(whole.getvalue(), FIELD_LIMIT))

"""The server of the page: files of ``static/``, and JSON from the run directories. It answers GET only, except
POST /api/set for the write key.

::

    GET /                                          the page
    GET /static/...                                its modules and styles
    GET /api/runs                                  one entry per run
    GET /api/overview, engines, attempts, logs     ?run=0
    GET /api/metrics, flags                        ?run=0&run=1
    GET /api/series                                ?run=0&name=reward/mean&points=600&from=1&to=900
    GET /api/samples                               ?run=0&kind=train&step=10
    GET /api/sample                                ?run=0&kind=train&step=10&attempt=17&sample=0&first=0&whole=1
    GET /api/search                                ?run=0&kind=train&text=why&before=10
    GET /api/story                                 ?run=0&subject=17
    GET /api/log                                   ?run=0&name=driver.log&before=4096, or &search=text
    GET /api/files                                 ?run=0
    GET /api/file                                  ?run=0&name=timeline.json.gz: not JSON, but the file
    GET /api/settings                              ?run=0: of a live run, for the write key; null for the read key
    POST /api/set                                  ?run=0, with {"lr": "1e-6"}: for the write key
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from miles_async.errors import MilesAsyncError
from miles_async.runtime.network.control import call
from miles_async.runtime.network.keys import Secret
from miles_async.runtime.processes.run_process import control_of
from miles_async.samples.columns import Kind
from miles_async.watch.access import CHANGE, Doorkeeper
from miles_async.watch.run import Run
from miles_async.watch.timeline.build import FILE_NAME as TIMELINE
from miles_async.watch.timeline.build import compressed, trace
from miles_async.watch.views import attempts, engines, files, flags, logs, metrics, overview, samples

if TYPE_CHECKING:
    import uvicorn

STATIC = Path(__file__).parent / "static"

View = Callable[[Sequence[Run], QueryParams], object]
"""(the runs that a request names, its other parameters) → JSON."""


class BadRequest(Exception):
    """A parameter or a change that is missing or wrong."""


def make_app(runs: Sequence[Run], key: Secret, write_key: Secret | None = None) -> Starlette:
    """The application that shows ``runs`` to holders of ``key``, and lets holders of ``write_key`` change settings."""
    routes: list[BaseRoute] = [
        Route("/", lambda _: FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")),
        Mount("/static", StaticFiles(directory=STATIC)),
        *(Route(f"/api/{name}", _endpoint(view, runs)) for name, view in VIEWS.items()),
        Route("/api/file", lambda request: _file(_chosen(runs, request)[0], request.query_params.get("name", ""))),
        Route("/api/settings", partial(_settings, runs, write_key)),
        Route(CHANGE, partial(_change, runs), methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Doorkeeper, key=key, write_key=write_key)],
        # An OSError: a file that was removed or is no longer whole.
        exception_handlers={BadRequest: _refused(400), MilesAsyncError: _refused(404), OSError: _refused(404)},
    )


def make_server(runs: Sequence[Run], key: Secret, write_key: Secret | None = None) -> uvicorn.Server:
    """The server of :func:`make_app`. Its ``run`` serves until interrupted; slow preparations begin here."""
    import uvicorn

    threading.Thread(target=_read_ahead, args=(runs,), name="read-ahead", daemon=True).start()
    config = uvicorn.Config(make_app(runs, key, write_key), log_level="warning", access_log=False, server_header=False)
    return uvicorn.Server(config)


def _read_ahead(runs: Sequence[Run]) -> None:
    import pyarrow.compute  # they take 0.3 s, for which the first list of samples would wait
    import pyarrow.parquet  # noqa: F401

    for run in runs:
        with suppress(OSError):  # a file that was removed meanwhile
            samples.samples(run, "train", None)
        run.read_ahead()


def _endpoint(view: View, runs: Sequence[Run]) -> Callable[[Request], Response]:
    """Not a coroutine: starlette calls it in a thread."""
    return lambda request: _json(view(_chosen(runs, request), request.query_params))


def _refused(status: int) -> Callable[[Request, Exception], Response]:
    return lambda _, error: _json({"error": str(error)}, status)


def _file(run: Run, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{quote(name)}"'}
    if name == TIMELINE:
        content = b"".join(compressed(trace(run)))
        return Response(content, media_type="application/gzip", headers=headers)
    path = files.profile(run, name)
    if path is None:
        return _json({"error": f"there is no file {name[:200]!r} to download"}, 404)
    return FileResponse(path, media_type="application/octet-stream", headers=headers)


def _settings(runs: Sequence[Run], write_key: Secret | None, request: Request) -> Response:
    if write_key is None or not write_key.opens_for(request.headers.get("authorization")):
        return _json(None)
    directory = _chosen(runs, request)[0].directory
    try:
        return _json({"settings": call(control_of(directory), "settings").splitlines(), "over": None})
    except MilesAsyncError as error:  # not a failure of the page
        return _json({"settings": [], "over": str(error)})


async def _change(runs: Sequence[Run], request: Request) -> Response:
    directory = _chosen(runs, request)[0].directory
    try:
        changes = msgspec.json.decode(await request.body(), type=dict[str, str])
        said = await asyncio.to_thread(lambda: call(control_of(directory), "set", changes=changes))
    except (MilesAsyncError, msgspec.MsgspecError) as error:
        raise BadRequest(str(error)) from error
    return _json({"said": said})


def _json(value: object, status: int = 200) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")


def encode(value: object) -> bytes:
    """JSON of a view. Half a surrogate pair, which UTF-8 lacks, becomes a question mark."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(value))


def _encodable(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode()
    if isinstance(value, Mapping):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def _chosen(runs: Sequence[Run], request: Request) -> list[Run]:
    words = request.query_params.getlist("run")
    numbers = [_number(word, "run") for word in words] if words else range(len(runs))
    if not all(0 <= number < len(runs) for number in numbers):
        raise BadRequest(f"run: expected 0 to {len(runs) - 1}")
    return [runs[number] for number in numbers]


def _number(word: str, name: str) -> int:
    if not word.isdecimal() or len(word) > 15:
        raise BadRequest(f"{name}: expected a whole number, found {word[:40]!r}")
    return int(word)


def _optional(parameters: QueryParams, name: str) -> int | None:
    word = parameters.get(name)
    return None if word in (None, "") else _number(str(word), name)


def _series(runs: Sequence[Run], parameters: QueryParams) -> object:
    low, high = _optional(parameters, "from"), _optional(parameters, "to")
    return metrics.series(
        runs[0],
        parameters.getlist("name"),
        points=_optional(parameters, "points") or 600,
        low=-math.inf if low is None else low,
        high=math.inf if high is None else high,
    )


def _log(runs: Sequence[Run], parameters: QueryParams) -> object:
    name, text = parameters.get("name", ""), parameters.get("search", "")
    if not name:
        return logs.search_all(runs[0], text) if text else {"logs": [], "matches": 0}
    return logs.search(runs[0], name, text) if text else logs.page(runs[0], name, _optional(parameters, "before"))


def _attempts(runs: Sequence[Run], parameters: QueryParams) -> object:
    text, end = parameters.get("text", ""), parameters.get("end", "")
    return attempts.attempts(runs[0], text=text, end=end, before=_optional(parameters, "before"))


def _kind(parameters: QueryParams) -> Kind:
    try:
        return msgspec.convert(parameters.get("kind", "train"), Kind)
    except msgspec.ValidationError:
        raise BadRequest(f"kind: expected one of {', '.join(get_args(Kind))}") from None


def _required(parameters: QueryParams, name: str) -> int:
    return _number(parameters.get(name, ""), name)


def _sample(runs: Sequence[Run], parameters: QueryParams) -> object:
    attempt = parameters.get("attempt", "")
    return samples.sample(
        runs[0],
        _kind(parameters),
        _required(parameters, "step"),
        (-1 if attempt.startswith("-") else 1) * _number(attempt.removeprefix("-"), "attempt"),  # negative: evaluations
        _required(parameters, "sample"),
        first=_optional(parameters, "first"),
        whole=parameters.get("whole") == "1",
    )


def _search(runs: Sequence[Run], parameters: QueryParams) -> object:
    text = parameters.get("text", "")
    return samples.search(runs[0], _kind(parameters), text, _optional(parameters, "before"))


VIEWS: Mapping[str, View] = {
    "runs": lambda runs, _: [overview.standing(run) for run in runs],
    "overview": lambda runs, _: overview.overview(runs[0]),
    "metrics": lambda runs, _: metrics.names(runs),
    "series": _series,
    "engines": lambda runs, _: engines.engines(runs[0]),
    "attempts": _attempts,
    "story": lambda runs, parameters: attempts.story(runs[0], parameters.get("subject", "")),
    "samples": lambda runs, parameters: samples.samples(runs[0], _kind(parameters), _optional(parameters, "step")),
    "sample": _sample,
    "search": _search,
    "flags": lambda runs, parameters: flags.flags(runs, parameters.get("preset")),
    "logs": lambda runs, _: logs.logs(runs[0]),
    "log": _log,
    "files": lambda runs, _: files.files(runs[0]),
}

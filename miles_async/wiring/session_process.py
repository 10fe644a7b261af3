"""A process of the session server: ``python -m miles_async.wiring.session_process <settings as JSON> <socket>``.

It composes its own parts: template and parsers for trajectories, and the engines through the rollout process, to which
it reports. Its keys come in the environment.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import uvloop

from miles_async.arguments.sessions import TurnHistory
from miles_async.errors import TransientEngineError
from miles_async.prompts.templates import ChatTemplate
from miles_async.prompts.tokenizers import load_tokenizer
from miles_async.runtime import garbage
from miles_async.runtime.network.keys import SessionKeys, take_session_keys
from miles_async.runtime.network.tls import Tls
from miles_async.runtime.picture_processor import load_picture_processor
from miles_async.sessions.engine_link import Alive, EngineLink
from miles_async.sessions.server import SessionServer
from miles_async.trajectory.taker import trajectory_factory
from miles_async.wiring.reply_parsers import reply_parser

REPORT_SECONDS = 1.0


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    hf_checkpoint: str
    trust_remote_code: bool = False  # of its tokenizer
    host: str  # address of this node at which agents reach it
    ports: tuple[int, int] | None = None  # of which to choose one: range(*ports)
    tls: Tls | None = None
    session_timeout: float  # seconds
    tool_call_parser: str | None
    reasoning_parser: str | None
    turn_history: TurnHistory = "sampled"
    stops: tuple[str, ...] = ()

    def command(self, socket: Path) -> tuple[str, ...]:
        """Arguments of the interpreter. ``socket``: to report to."""
        return ("-m", "miles_async.wiring.session_process", msgspec.json.encode(self).decode(), str(socket))


async def serve(settings: ServerSettings, keys: SessionKeys, socket_path: Path) -> None:
    """Serve until the rollout process is gone."""
    tokenizer = load_tokenizer(Path(settings.hf_checkpoint), settings.trust_remote_code)
    images = load_picture_processor(Path(settings.hf_checkpoint))
    ends = images.placeholders if images is not None else frozenset[int]()
    template = ChatTemplate(tokenizer, apply_chat_template=True, ends=ends, stops=settings.stops)
    parser = reply_parser(template, settings.tool_call_parser, settings.reasoning_parser)
    make = trajectory_factory(parser, turn_history=settings.turn_history, images=images)
    link = await EngineLink.connect(socket_path)
    server = SessionServer(link, make, keys=keys, session_timeout=settings.session_timeout)
    garbage.settle()
    ports = range(*settings.ports) if settings.ports else None
    await serve_sessions(server, link, settings.host, ports, settings.tls)


async def serve_sessions(
    server: SessionServer, link: EngineLink, host: str, ports: range | None = None, tls: Tls | None = None
) -> None:
    """Serve and report to the rollout process until it is gone, which raises TransientEngineError."""
    try:
        await server.start(host, ports, tls)
        async with asyncio.TaskGroup() as scope:
            scope.create_task(link.receive())
            scope.create_task(server.expire())
            while True:
                await link.report(Alive(instance_id=server.instance_id, url=server.url, began=server.began()))
                await asyncio.sleep(REPORT_SECONDS)
    finally:
        await server.stop()
        await link.close()


def main(arguments: list[str]) -> int:
    """Exit code 1 when the rollout process is gone, which is how it ends."""
    settings, socket_path = arguments
    keys = take_session_keys(os.environ)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(msgspec.json.decode(settings, type=ServerSettings), keys, Path(socket_path)))
    except* TransientEngineError as errors:
        print(f"session server ends: {errors.exceptions[0]}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Keys of a run's HTTP doors: made at its start, compared in constant time, never shown.

They travel as arguments of Ray actors and in the environment of child processes, where only this user can read them:
never in arguments of a process, which every user of the machine sees. docs/security.md says what each key opens.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from miles_async.errors import ConfigurationError
from miles_async.runtime.network.addresses import LOOPBACK

API_KEY_VARIABLE = "MILES_ASYNC_API_KEY"
ADMIN_KEY_VARIABLE = "MILES_ASYNC_ADMIN_KEY"
AGENTS_KEY_VARIABLE = "MILES_ASYNC_AGENTS_KEY"
SESSIONS_KEY_VARIABLE = "MILES_ASYNC_SESSIONS_KEY"
METRICS_KEY_VARIABLE = "MILES_ASYNC_METRICS_KEY"  # the user's, for Prometheus

KEY_VARIABLES = (
    API_KEY_VARIABLE,
    ADMIN_KEY_VARIABLE,
    AGENTS_KEY_VARIABLE,
    SESSIONS_KEY_VARIABLE,
    METRICS_KEY_VARIABLE,
)
_KEY_BYTES = 32
_BEARER = "bearer "


class Secret:
    """A hidden text: ``repr`` and ``str`` don't show it, so that no log, traceback or dump has it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself, for the place where it is used."""
        return self._text

    def matches(self, offered: str) -> bool:
        """Compare in a time that does not depend on where the two differ."""
        return hmac.compare_digest(self._text.encode(), offered.encode(errors="surrogateescape"))

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._text}"}

    def opens_for(self, authorization: str | None) -> bool:
        """True if the Authorization header of a request has this key."""
        if authorization is None or not authorization.lower().startswith(_BEARER):
            return False
        return self.matches(authorization[len(_BEARER) :].strip())

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.matches(other._text)

    def __hash__(self) -> int:
        return hash(self._text)


def fresh_key() -> Secret:
    return Secret(secrets.token_urlsafe(_KEY_BYTES))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKeys:
    api: Secret  # generation
    admin: Secret  # weights, pauses, caches; the router's list of engines

    def environment(self) -> dict[str, str]:
        """Variables by which a server's process is given its keys."""
        return {API_KEY_VARIABLE: self.api.reveal(), ADMIN_KEY_VARIABLE: self.admin.reveal()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionKeys:
    """Keys of the session server."""

    agents: Secret  # turns and the other requests of agents
    run: Secret  # opening and collecting sessions

    def environment(self) -> dict[str, str]:
        """Variables by which the server's process is given its keys."""
        return {AGENTS_KEY_VARIABLE: self.agents.reveal(), SESSIONS_KEY_VARIABLE: self.run.reveal()}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKeys:
    engines: EngineKeys
    sessions: SessionKeys


def make_run_keys(environment: Mapping[str, str]) -> RunKeys:
    """Make the keys of a run. Engines' keys come from ``environment`` where it has them, for servers that were started
    separately; an API key alone is the admin key, too, as it is for SGLang.
    """
    given, admin = environment.get(API_KEY_VARIABLE), environment.get(ADMIN_KEY_VARIABLE)
    api = Secret(given) if given else fresh_key()
    admin_key = Secret(admin) if admin else api if given else fresh_key()
    return RunKeys(
        engines=EngineKeys(api=api, admin=admin_key), sessions=SessionKeys(agents=fresh_key(), run=fresh_key())
    )


def take_engine_keys(environment: MutableMapping[str, str]) -> EngineKeys | None:
    """Take the keys that :meth:`EngineKeys.environment` handed over out of a process's environment, so that no child
    inherits them. None if there are none.
    """
    api, admin = environment.pop(API_KEY_VARIABLE, None), environment.pop(ADMIN_KEY_VARIABLE, None)
    return EngineKeys(api=Secret(api), admin=Secret(admin)) if api and admin else None


def take_session_keys(environment: MutableMapping[str, str]) -> SessionKeys:
    """Take the session server's keys, as :func:`take_engine_keys` does; it does not start without them."""
    return SessionKeys(
        agents=Secret(environment.pop(AGENTS_KEY_VARIABLE)), run=Secret(environment.pop(SESSIONS_KEY_VARIABLE))
    )


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy of ``environment`` without keys of the run, for programs that it runs and does not trust."""
    return {name: value for name, value in environment.items() if name not in KEY_VARIABLES}


def require_keys(host: str, keys: EngineKeys | None) -> None:
    """Refuse to open a door on a network without keys. Raises ConfigurationError."""
    if keys is None and host != LOOPBACK:
        raise ConfigurationError(f"expected keys for a server that other machines can reach at {host}, found none")

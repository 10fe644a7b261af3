"""Ports, interfaces, services outside, and the clock."""

from __future__ import annotations

import http.client
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import psutil

from miles_async.errors import ConfigurationError
from miles_async.machine.finding import Finding
from miles_async.runtime.network.addresses import LOOPBACK
from miles_async.runtime.network.ports import bind_port

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CLOCK_SECONDS = 60.0  # certificates and signed requests stand as much
REPLY_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    name: str
    variable: str  # environment variable with another URL
    url: str
    offline: tuple[str, Sequence[str]]  # variable, and its values with which the service is not used
    mend: str


HUB = Service(
    name="Hugging Face hub",
    variable="HF_ENDPOINT",
    url="https://huggingface.co",
    offline=("HF_HUB_OFFLINE", ("1", "true", "yes", "on")),
    mend="export HF_ENDPOINT=<mirror> or https_proxy=<proxy>; runs read local directories and need no hub",
)
WANDB = Service(
    name="wandb",
    variable="WANDB_BASE_URL",
    url="https://api.forge.coreweave.com",
    offline=("WANDB_MODE", ("offline", "disabled")),
    mend="export WANDB_BASE_URL=<server> or https_proxy=<proxy>; or log with --wandb-mode offline",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Answer of a service with any status."""

    error: str | None = None  # why there is none
    seconds_ahead: float | None = None  # of its clock, compared with ours


def ask(url: str, seconds: float = REPLY_SECONDS) -> Reply:
    """Ask for the header of ``url``. Looking up a name has no deadline, hence a thread that may be left."""
    replies = [Reply(error=f"no answer within {seconds:g} s")]
    thread = threading.Thread(target=lambda: replies.append(_ask(url, seconds)), name="ask", daemon=True)
    thread.start()
    thread.join(seconds + 1)
    return replies[-1]


def _ask(url: str, seconds: float) -> Reply:
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "miles-async-doctor"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:  # an answer, too
        headers = error.headers
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Reply(error=str(getattr(error, "reason", error)))
    try:
        return Reply(seconds_ahead=parsedate_to_datetime(headers["Date"]).timestamp() - time.time())
    except (TypeError, ValueError):  # it says none, or something else
        return Reply()


def service_findings(service: Service, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Ask a service, and compare clocks with it. A missing service is a warning: runs work without it."""
    variable, values = service.offline
    if (value := environment.get(variable, "")).lower() in values:
        yield Finding(check="network", verdict="ok", found=f"{service.name}: not asked ({variable}={value})")
        return
    url = environment.get(service.variable) or service.url
    reply = ask(url)
    if reply.error is not None:
        found = f"{service.name}: {url} cannot be reached ({reply.error})"
        yield Finding(check="network", verdict="warning", found=found, mend=service.mend)
        return
    yield Finding(check="network", verdict="ok", found=f"{service.name}: {url} answers")
    if reply.seconds_ahead is not None:
        yield clock_finding(reply.seconds_ahead, f"that of {url}")


def clock_finding(seconds: float, other: str) -> Finding:
    """Judge how far this machine's clock is behind ``other``."""
    if abs(seconds) <= CLOCK_SECONDS:
        return Finding(check="clock", verdict="ok", found=f"within {CLOCK_SECONDS:g} s of {other}")
    side = "behind" if seconds > 0 else "ahead of"
    return Finding(
        check="clock",
        verdict="warning",
        found=f"{abs(seconds):.0f} s {side} {other}: certificates and time stamps of metrics go by it",
        mend="timedatectl set-ntp true, or chronyc makestep",
    )


def port_findings(ports: range | None = None) -> Iterator[Finding]:
    """Check that servers find a port. ``ports``: --port-range."""
    where = f"{ports[0]}-{ports[-1]}" if ports else "below the kernel's own"
    try:
        bind_port(LOOPBACK, ports).close()
    except ConfigurationError as error:
        yield Finding(check="ports", verdict="failure", found=str(error), mend="ss -tlnp")
    else:
        yield Finding(check="ports", verdict="ok", found=f"free ones {where}")


def interface_findings(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check that the interfaces that variables name for gloo and NCCL exist here."""
    there = list(psutil.net_if_addrs())
    for variable in INTERFACE_VARIABLES:
        named = environment.get(variable, "")
        if not named or named.startswith("^"):  # NCCL: all but these
            continue
        exact = variable.startswith("GLOO") or named.startswith("=")  # else NCCL takes them as beginnings of names
        for name in named.removeprefix("=").split(","):
            if not any(found == name if exact else found.startswith(name) for found in there):
                yield Finding(
                    check="interfaces",
                    verdict="failure",
                    found=f"{variable}={named}: this machine has no interface {name}, it has {', '.join(there)}",
                    mend=f"unset {variable}, or name one of them (--network-interface)",
                )

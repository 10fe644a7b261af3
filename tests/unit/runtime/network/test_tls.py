"""Certificates are tried before anything starts, with what clients and servers of the run would use."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from miles_async.arguments import Arguments
from miles_async.arguments.cluster import ClusterArguments
from miles_async.arguments.cluster_checks import check_network
from miles_async.errors import ConfigurationError
from miles_async.runs.checks import tls_problems
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.network.tls import Tls
from miles_async.sessions.server import SessionServer
from tests.fakes.certificates import Authority, needs_openssl
from tests.fakes.keys import KEYS
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import make_trajectory, says

pytestmark = needs_openssl

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    return authority.issue(HERE, "10.0.0.2")


def refusal(tls: Tls, address: str | None = HERE) -> str:
    with pytest.raises(ConfigurationError) as caught:
        tls.check(address)
    return str(caught.value)


def test_a_certificate_that_clients_accept_passes(tls: Tls) -> None:
    for address in (HERE, "10.0.0.2", None):
        tls.check(address)


def test_a_certificate_that_clients_would_refuse_is_refused_before_with_the_reason(
    tls: Tls, authority: Authority, tmp_path: Path
) -> None:  # covers: C13
    assert "IP address mismatch, certificate is not valid for '10.0.0.3'" in refusal(tls, "10.0.0.3")
    assert "certificate has expired" in refusal(authority.issue(HERE, name="old", days=-1))
    other = Authority.make(tmp_path)
    assert "unable to get local issuer certificate" in refusal(replace(tls, ca=str(other.certificate)))
    system = refusal(replace(tls, ca=None))
    assert "the authorities of this system (no --tls-ca)" in system
    assert f"--tls-certificate {tls.certificate}" in system


def test_files_that_cannot_be_used_are_named_with_their_flags(tls: Tls, authority: Authority, tmp_path: Path) -> None:
    other = authority.issue(HERE, name="other")
    assert "the key does not belong to the certificate" in refusal(replace(tls, key=other.key))
    assert "No such file" in refusal(replace(tls, key=str(tmp_path / "absent")))
    assert f"--tls-certificate {tls.key}" in refusal(replace(tls, certificate=tls.key))
    assert f"--tls-ca {tls.key}" in refusal(replace(tls, ca=tls.key))
    assert "No such file" in refusal(replace(tls, ca=str(tmp_path / "absent")))


def test_flags_are_checked_together_and_before_a_run(tls: Tls, authority: Authority) -> None:
    certificate, key, ca = map(Path, (tls.certificate, tls.key, str(tls.ca)))

    def problems(**flags: Path) -> list[str]:
        arguments = Arguments(cluster=ClusterArguments(**flags))
        return [*check_network(arguments), *tls_problems(arguments)]

    assert problems() == []
    assert problems(tls_certificate=certificate, tls_key=key, tls_ca=ca) == []
    for half in ({"tls_certificate": certificate}, {"tls_key": key}, {"tls_ca": ca}):
        assert "--tls-certificate and --tls-key" in "".join(problems(**half))
    (problem,) = problems(tls_certificate=certificate, tls_key=key)
    assert "no --tls-ca" in problem


def test_addresses_of_servers_say_that_they_speak_tls(tls: Tls) -> None:
    assert Network(tls=tls).url("10.0.0.2", 80) == "https://10.0.0.2:80"
    assert Network().url("10.0.0.2", 80) == "http://10.0.0.2:80"
    cluster = ClusterArguments(tls_certificate=Path(tls.certificate), tls_key=Path(tls.key), tls_ca=Path(str(tls.ca)))
    assert Network.of_run(cluster).tls == tls


def test_agents_and_hooks_find_the_authority_beside_those_that_they_trusted(tls: Tls, tmp_path: Path) -> None:
    def subjects(bundle: str) -> list[str]:
        trusted = ssl.create_default_context(cafile=bundle).get_ca_certs()
        return [str(certificate["subject"]) for certificate in trusted]

    another = Authority.make(tmp_path / "another")
    found = tls.trusted(tmp_path, {"REQUESTS_CA_BUNDLE": str(another.certificate), "SSL_CERT_FILE": "/nowhere"})
    assert set(found) == {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"}
    assert len(subjects(found["SSL_CERT_FILE"])) > 50
    assert "an authority of tests" in "".join(subjects(found["SSL_CERT_FILE"]))
    mine = Path(found["REQUESTS_CA_BUNDLE"]).read_text()
    assert another.certificate.read_text() in mine
    assert Path(str(tls.ca)).read_text() in mine
    assert replace(tls, ca=None).trusted(tmp_path) == {}


@pytest_asyncio.fixture
async def server(tls: Tls) -> AsyncIterator[SessionServer]:
    server = SessionServer(ScriptedModel(says("68")), make_trajectory, keys=KEYS.sessions, session_timeout=60.0)
    await server.start(HERE, tls=tls)
    yield server
    await server.stop()


async def test_a_program_that_knows_nothing_of_certificates_reaches_its_session(
    server: SessionServer, tls: Tls, tmp_path: Path
) -> None:
    program = (
        "import sys, urllib.request as u\n"
        "r = u.Request(sys.argv[1] + '/health', headers={'Authorization': 'Bearer ' + sys.argv[2]})\n"
        "print(u.build_opener(u.ProxyHandler({})).open(r, timeout=30).status)"
    )
    words = (sys.executable, "-c", program, server.url, KEYS.sessions.agents.reveal())
    for trusted, status in ((tls.trusted(tmp_path), 0), ({}, 1)):
        child = await asyncio.create_subprocess_exec(
            *words, env={**os.environ, **trusted}, stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(60):
            assert await child.wait() == status


async def test_the_session_server_speaks_tls_to_agents_that_trust_its_authority(
    server: SessionServer, tls: Tls
) -> None:  # covers: C13
    assert server.url.startswith("https://")
    async with aiohttp.ClientSession(headers=KEYS.sessions.agents.headers()) as http:
        async with http.get(f"{server.url}/health", ssl=tls.client()) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(f"{server.url}/health")
        with pytest.raises(aiohttp.ClientError):
            await http.get(server.url.replace("https", "http") + "/health")

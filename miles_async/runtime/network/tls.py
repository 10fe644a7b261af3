"""TLS of a run's HTTP doors, with certificates that the user gives.

Every server of the run has the same certificate, from files that are at the same path on every node; every client of
the run verifies it, addresses included. Whether that can work is tried before anything is started, by a handshake in
memory with the settings of both sides: it finds problems that clients would find later, with less detail.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.cluster import ClusterArguments
from miles_async.errors import ConfigurationError

BUNDLE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables by which OpenSSL and httpx, and requests, find the authorities that they trust."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Paths of files in PEM form."""

    certificate: str  # of the servers, with the chain up to the authority
    key: str  # of the certificate, without a passphrase
    ca: str | None  # authorities that clients trust; None: the system's

    @classmethod
    def of_run(cls, cluster: ClusterArguments) -> Tls | None:
        if cluster.tls_certificate is None or cluster.tls_key is None:
            return None
        ca = str(cluster.tls_ca.absolute()) if cluster.tls_ca is not None else None
        return cls(certificate=str(cluster.tls_certificate.absolute()), key=str(cluster.tls_key.absolute()), ca=ca)

    def server(self) -> ssl.SSLContext:
        """Context of a server. Raises ConfigurationError if the files cannot be used."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Without a passphrase: OpenSSL would ask for it on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"--tls-certificate {self.certificate}, --tls-key {self.key}: expected a certificate and its own key "
                f"without a passphrase, as PEM files that can be read on every node: {_reason(error)}"
            ) from None
        return context

    def client(self) -> ssl.SSLContext:
        """Context of a client. Raises ConfigurationError if the authorities cannot be read."""
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"--tls-ca {self.ca}: expected a PEM file with certificates of authorities that can be read on every "
                f"node: {_reason(error)}"
            ) from None

    def check(self, address: str | None) -> None:
        """Check that clients of a server at ``address`` would accept it. Raises ConfigurationError.

        None: the address is not known yet, and any will do.
        """
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.server().wrap_bio(to_server, to_client, server_side=True)
        trusting = self.client()
        trusting.check_hostname = address is not None
        client = trusting.wrap_bio(to_client, to_server, server_hostname=address)
        try:
            for side in (client, server, client):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    pass
        except ssl.SSLCertVerificationError as error:
            authorities = f"--tls-ca {self.ca}" if self.ca else "the authorities of this system (no --tls-ca)"
            raise ConfigurationError(
                f"--tls-certificate {self.certificate}: a client that trusts {authorities} refuses it for a server at "
                f"{address or 'any address'}: {error.verify_message.rstrip('.')}. Expected a certificate that is valid "
                f"now, was signed by such an authority, and names the addresses of all nodes (subjectAltName=IP:...)"
            ) from None

    def trusted(self, directory: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Write the authorities that programs here trust, and ``ca``, to files in ``directory``; return the
        variables by which agents and hooks find them. Empty if the system's are trusted.
        """
        if self.ca is None:
            return {}
        from requests.utils import DEFAULT_CA_BUNDLE_PATH  # httpx trusts the same

        found = {}
        for name in BUNDLE_VARIABLES:
            given = Path(environment.get(name, ""))
            trusted = given if given.is_file() else Path(DEFAULT_CA_BUNDLE_PATH)
            bundle = directory / f"{name.lower()}.pem"
            bundle.write_bytes(trusted.read_bytes() + b"\n" + Path(self.ca).read_bytes())
            found[name] = str(bundle)
        return found


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return {"KEY_VALUES_MISMATCH": "the key does not belong to the certificate"}.get(error.reason, str(error))
    return error.strerror or str(error)

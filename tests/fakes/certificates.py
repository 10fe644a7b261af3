"""Certificates of an authority of one's own, made by the command ``openssl``."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_async.runtime.network.tls import Tls

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the command openssl is not here")


@dataclass(frozen=True)
class Authority:
    """An authority whose files are in ``directory``."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> Authority:
        directory.mkdir(parents=True, exist_ok=True)
        authority = cls(directory)
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-keyout", directory / "ca.key", "-out", authority.certificate),
            *("-days", "2", "-subj", "/CN=an authority of tests"),
        )
        return authority

    @property
    def certificate(self) -> Path:
        return self.directory / "ca.pem"

    def issue(self, *addresses: str, name: str = "node", days: int = 2) -> Tls:
        """A certificate for servers at ``addresses``. ``days``: until it expires; before now if negative."""
        request, key, certificate = (self.directory / f"{name}.{kind}" for kind in ("csr", "key", "pem"))
        extensions = self.directory / f"{name}.extensions"
        named = ",".join(f"IP:{address}" for address in addresses)
        extensions.write_text(f"subjectAltName={named}\nbasicConstraints=CA:FALSE\n")
        _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.directory / "ca.key"),
            *("-CAcreateserial", "-days", days, "-extfile", extensions, "-out", certificate),
        )
        return Tls(certificate=str(certificate), key=str(key), ca=str(self.certificate))


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=60)

"""A hub of data sets on this machine, for ``HF_ENDPOINT``: as much of its API as ``datasets`` uses."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]


class FakeHub:
    """One data set; its newest commit is ``main``."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self.commits: dict[str, Files] = {}
        self.requests: list[str] = []

    def push(self, files: Files) -> str:
        """Make a commit of these files; return its name."""
        content = b"".join(path.encode() + data for path, data in sorted(files.items()))
        commit = hashlib.sha1(content).hexdigest()
        self.commits.pop(commit, None)
        self.commits[commit] = files
        return commit

    def commit(self, revision: str) -> str | None:
        return list(self.commits)[-1] if revision == "main" else revision if revision in self.commits else None

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of a request for ``path``."""
        self.requests.append(path)
        if found := re.fullmatch(rf"/datasets/{self.name}/resolve/([^/]+)/(.+)", path):
            commit = self.commit(found[1])
            if commit is None or (content := self.commits[commit].get(found[2])) is None:
                code = "RevisionNotFound" if commit is None else "EntryNotFound"
                return 404, {"X-Error-Code": code}, b""
            return 200, {"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"'}, content
        if found := re.fullmatch(rf"/api/datasets/{self.name}(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", path):
            commit = self.commit(found[2] or "main")
            if commit is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            if found[1] == "tree":
                return _json(list(self._tree(commit, found[3] or "")))
            siblings = [{"rfilename": name} for name in self.commits[commit]]
            return _json({"id": self.name, "sha": commit, "siblings": siblings, "tags": [], "private": False})
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _tree(self, commit: str, folder: str) -> Iterator[dict[str, object]]:
        begin, folders = f"{folder}/" if folder else "", set[str]()
        for path, content in self.commits[commit].items():
            if not path.startswith(begin):
                continue
            head, inside, _ = path[len(begin) :].partition("/")
            if inside and head not in folders:
                folders.add(head)
                yield {"type": "directory", "path": begin + head, "oid": "0" * 40, "size": 0}
            yield {"type": "file", "path": path, "oid": _oid(content), "size": len(content)}


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def fake_hub(name: str) -> Iterator[FakeHub]:
    """Serve a data set until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(unquote(urlsplit(self.path).path))
            self.send_response(status)
            for header, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = FakeHub(name, f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""A small hub on loopback: what huggingface_hub asks a real one, with large files on another host, and faults."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE_BYTES = 4096  # from here on a file is stored as the hub stores large ones: by SHA-256, on another host


@dataclass(slots=True)
class Repository:
    """``commits``: the files of each. ``needs_token``: private. ``gated``: not to be read without consent."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    needs_token: str = ""
    gated: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make ``branch`` point to these files."""
        digest = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[digest] = dict(files)
        self.branches[branch] = digest
        return digest

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


@dataclass(frozen=True, slots=True)
class Request:
    """One that was answered. ``host``: "hub", or "store" for the host of large files."""

    host: str
    method: str
    path: str
    token: str
    range: str


class HubServer:
    """``faults``: by file name, what goes wrong with the next transfers of it, one after the other.

    "cut": the connection ends halfway; "short": so does a body of no stated length; "html": an error page with status
    200; "damaged": one bit is wrong; "longer": a byte too many; an int: that status.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, list[str | int]] = {}
        self.requests: list[Request] = []
        self.listing: dict[str, Any] | bytes | None = None  # in place of every list of files
        self.sends_parts = True  # or else whole files, whatever is asked for
        self.held = threading.Event()  # transfers wait for it
        self.held.set()
        self.started = threading.Semaphore(0)  # counts transfers
        self._hub, self._store = (_listen(self, host) for host in ("hub", "store"))
        self._threads = [threading.Thread(target=s.serve_forever, args=(0.05,)) for s in (self._hub, self._store)]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._hub.server_port}"

    @property
    def store(self) -> str:
        return f"http://localhost:{self._store.server_port}"

    def repository(self, name: str, files: Mapping[str, bytes]) -> Repository:
        self.repositories[name] = repository = Repository()
        repository.commit(files)
        return repository

    def transfers(self, name: str) -> list[Request]:
        """The GET requests for a file's bytes."""
        return [r for r in self.requests if r.method == "GET" and r.path.endswith("/" + name) and "/api/" not in r.path]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self.held.set()
        for server, thread in zip((self._hub, self._store), self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    server.start()
    try:
        yield server
    finally:
        server.close()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _listen(hub: HubServer, host: str) -> ThreadingHTTPServer:
    class Handler(_Handler):
        owner = hub
        host_name = host

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    return server


class _Handler(BaseHTTPRequestHandler):
    owner: HubServer
    host_name: str
    timeout = 20

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        wanted_range = self.headers.get("range", "")
        self.owner.requests.append(Request(self.host_name, self.command, path, token, wanted_range))
        parts = path.strip("/").split("/")
        if self.host_name == "store":
            repository, commit, name = "/".join(parts[:2]), parts[2], "/".join(parts[3:])
            self._send_file(self.owner.repositories[repository].commits[commit][name], name, {}, body)
            return
        is_listing = parts[:2] == ["api", "models"]
        repository_name = "/".join(parts[2:4] if is_listing else parts[:2])
        repository = self.owner.repositories.get(repository_name)
        if repository is None or (repository.needs_token and token != repository.needs_token):
            self._refuse(401, "RepoNotFound", "Repository Not Found")
            return
        if is_listing:
            commit = repository.resolve(urllib.parse.unquote(url.path.split("/revision/")[1]))
            if commit is None:
                self._refuse(404, "RevisionNotFound", "Revision Not Found")
                return
            if self._fault("listing") is not None:
                return
            self._send_listing(repository_name, commit, repository.commits[commit])
            return
        if repository.gated:
            self._refuse(403, "GatedRepo", "Access to the repository is restricted")
            return
        commit = repository.resolve(parts[3])
        name = "/".join(parts[4:])
        if commit is None:
            self._refuse(404, "RevisionNotFound", "Revision Not Found")
        elif name not in repository.commits[commit]:
            self._refuse(404, "EntryNotFound", "Entry Not Found", {"X-Repo-Commit": commit})
        else:
            self._resolve(repository_name, commit, name, repository.commits[commit][name], body)

    def _resolve(self, repository: str, commit: str, name: str, data: bytes, body: bool) -> None:
        headers = {"X-Repo-Commit": commit}
        if len(data) < LARGE_BYTES:
            self._send_file(data, name, {**headers, "ETag": f'"{blob_id(data)}"'}, body)
            return
        headers["X-Linked-Etag"] = f'"{hashlib.sha256(data).hexdigest()}"'
        headers["X-Linked-Size"] = str(len(data))
        headers["Location"] = f"{self.owner.store}/{repository}/{commit}/{name}"
        self._send(302, b"", headers, body)

    def _send_listing(self, repository: str, commit: str, files: Mapping[str, bytes]) -> None:
        siblings = []
        for name, data in files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob_id(data)}
            if len(data) >= LARGE_BYTES:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        answer: Any = {"id": repository, "sha": commit, "siblings": siblings}
        if isinstance(self.owner.listing, dict):
            answer |= self.owner.listing
        text = self.owner.listing if isinstance(self.owner.listing, bytes) else json.dumps(answer).encode()
        self._send(200, text, {"Content-Type": "application/json"}, body=True)

    def _send_file(self, data: bytes, name: str, headers: dict[str, str], body: bool) -> None:
        if body:
            self.owner.started.release()
            self.owner.held.wait(20)
            data_or_none = self._fault(name, data, headers)
            if data_or_none is None:
                return
            data = data_or_none
        wanted = self.headers.get("range", "")
        if wanted and self.owner.sends_parts:
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            part = data[int(low) : int(high) + 1 if high else len(data)]
            headers = {**headers, "Content-Range": f"bytes {low}-{int(low) + len(part) - 1}/{len(data)}"}
            self._send(206, part, headers, body)
            return
        self._send(200, data, headers, body)

    def _fault(self, name: str, data: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes | None:
        """The bytes to send in place of ``data``; None where nothing is left to do."""
        faults = self.owner.faults.get(name)
        if not faults:
            return data if data or headers is not None else None
        fault = faults.pop(0)
        if isinstance(fault, int):
            self._refuse(fault, "", "as asked")
            return None if name != "listing" else b""
        if fault == "damaged":
            return bytes([data[0] ^ 1]) + data[1:]
        if fault == "longer":
            return data + b"x"
        if fault == "html":
            self._send(200, b"<html>The proxy says no.</html>", {"Content-Type": "text/html"}, body=True)
            return None
        self.send_response(200)
        if fault == "cut":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        return None

    def _refuse(self, status: int, code: str, text: str, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": text, **(headers or {})}, body=False)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

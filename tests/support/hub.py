"""Stand-ins for the Hugging Face hub over HTTP, as far as huggingface_hub and datasets ask it: one
takes commits of small files, one gives the files of a data set.
"""

import base64
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from .http_stand_in import standing_in


class Hub:
    """Answers when a repository is made or looked at, and when files are committed to it.

    Args:
        private: what it says of a repository's visibility.
    """

    def __init__(self, private: bool = True) -> None:
        self.url = ""
        self.asked: list[tuple[str, str, bytes]] = []
        self._private = private

    def answer(self, path: str, headers: Message, body: bytes) -> tuple[int, bytes]:
        token = headers.get("authorization") or ""
        return 200, orjson.dumps(self._told(path.partition("?")[0], token, body))

    def _told(self, path: str, token: str, body: bytes) -> dict[str, Any]:
        self.asked.append((path, token, body))
        if path == "/api/repos/create":
            return {"url": f"{self.url}/datasets/me/x"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            kind = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": name, **kind} for name in names]}
        if "/commit/" in path:
            url = f"{self.url}/{path.split('/commit/')[0].partition('/api/')[2]}/commit/{'a' * 40}"
            return {"commitUrl": url, "commitOid": "a" * 40, "pullRequestUrl": None}
        if path.startswith("/api/models/"):
            name = path.removeprefix("/api/models/")
            return {"id": name, "private": self._private, "siblings": [], "tags": []}
        return {"errors": [], "warnings": []}

    def committed(self) -> dict[str, bytes]:
        """Returns the files of the only commit."""
        [commit] = [body for path, _, body in self.asked if "/commit/" in path]
        return {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in map(json.loads, commit.splitlines())
            if line["key"] == "file"
        }


@contextlib.contextmanager
def running_hub(*, private: bool = True) -> Iterator[Hub]:
    """Runs a hub in a thread."""
    hub = Hub(private)
    with standing_in(hub.answer) as hub.url:
        yield hub


COMMIT = "5" * 40


class DataSetHub:
    """A hub of one data set, for reading, that counts what it gives.

    Args:
        refuses: the error code with which every request is refused.
    """

    def __init__(self, files: dict[str, bytes], refuses: str = "") -> None:
        self.files, self.refuses, self.url = files, refuses, ""
        self.breaks: set[str] = set()
        self.given: Counter[str] = Counter()
        self.asked: list[str] = []

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        path, _, query = path.partition("?")
        recursive = "recursive=true" in query.lower()
        if self.refuses:
            return 403, {"X-Error-Code": self.refuses}, b"{}"
        _, found, name = path.partition("/resolve/")
        if found:
            self.asked.append(path)
            name = name.partition("/")[2]
            if name not in self.files:
                return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
            self.given[name] += method == "GET"
            if method == "GET" and name in self.breaks:
                return 500, {}, b""
            headers = {"ETag": f'"{self.facts(name)["digest"]}"', "X-Repo-Commit": COMMIT}
            return 200, headers, self.files[name]
        if "/tree/" in path:
            folder = path.partition("/tree/")[2].partition("/")[2]
            body: Any = self.entries(f"{folder}/" if folder else "", recursive)
        else:
            siblings = [{"rfilename": name, **self.facts(name)} for name in self.files]
            body = {"id": "x/y", "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
        return 200, {}, json.dumps(body).encode()

    def entries(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """The files below a folder, or the files and folders in it."""
        below = {name: name.removeprefix(folder) for name in self.files if name.startswith(folder)}
        files = [name for name, rest in below.items() if recursive or "/" not in rest]
        folders = {folder + rest.partition("/")[0] for name, rest in below.items()} - set(below)
        return [
            *({"type": "file", "path": name, **self.facts(name)} for name in files),
            *({"type": "directory", "path": name, "oid": "0" * 40} for name in folders),
        ]

    def facts(self, name: str) -> dict[str, Any]:
        """What the hub says of a file, and its digest; large are tables."""
        data = self.files[name]
        facts: dict[str, Any] = {"size": len(data), "blobId": "0" * 40, "oid": "0" * 40}
        if name.endswith(".parquet"):
            digest = hashlib.sha256(data).hexdigest()
            facts["lfs"] = {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 130}
        else:
            header = f"blob {len(data)}\0".encode()
            digest = hashlib.sha1(header + data, usedforsecurity=False).hexdigest()
        return {**facts, "digest": digest}


@contextlib.contextmanager
def serving(hub: DataSetHub) -> Iterator[DataSetHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            status, headers, body = hub.answer(self.command, self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = reply

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever)
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()

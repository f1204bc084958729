"""A stand-in for the Hugging Face hub over HTTP, as far as huggingface_hub asks it when it commits
small files.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson


class Hub(ThreadingHTTPServer):
    """Answers when a repository is made or looked at, and when files are committed to it.

    Args:
        private: what it says of a repository's visibility.
    """

    def __init__(self, private: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, str, bytes]] = []
        self._private = private

    def answer(self, path: str, token: str, body: bytes) -> dict[str, Any]:
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


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        token = self.headers.get("authorization") or ""
        data = orjson.dumps(self.server.answer(self.path.partition("?")[0], token, body))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *words: object) -> None:
        pass


@contextlib.contextmanager
def running_hub(*, private: bool = True) -> Iterator[Hub]:
    """Runs a hub in a thread."""
    with Hub(private) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

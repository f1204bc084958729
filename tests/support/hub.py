"""A stand-in for the Hugging Face hub over HTTP, as far as huggingface_hub asks it when it commits
small files.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from email.message import Message
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

"""A pytest plugin for atroposlib's own HTTP tests: they meet our server instead of starting theirs.

`ENVSERVER_URL` says where ours is. What they send to port 8000 goes there, and what they start as
"their server" is a process that only waits to be ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import requests

THEIRS = "http://localhost:8000"
OURS = os.environ["ENVSERVER_URL"]

_request = requests.Session.request
_popen = subprocess.Popen


def _redirected(self: requests.Session, method: str, url: str, *rest: Any, **more: Any) -> Any:
    return _request(self, method, url.replace(THEIRS, OURS), *rest, **more)


def _waiting(command: Any, *rest: Any, **more: Any) -> Any:
    if "atroposlib.cli.run_api" in command:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
    return _popen(command, *rest, **more)


requests.Session.request = _redirected  # type: ignore[method-assign]
subprocess.Popen = _waiting  # type: ignore[misc,assignment]

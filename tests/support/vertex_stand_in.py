"""A stand-in of Vertex AI's tuning jobs, as its REST reference describes them: create, get, list.

It refuses what the reference does not have, and can be told to fail for a while. It does not prove
what the service itself does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BODY = {
    *("baseModel", "supervisedTuningSpec", "tunedModelDisplayName", "labels", "description"),
    *("outputUri", "customBaseModel"),  # v1beta1 only
}
SPEC = {"trainingDatasetUri", "validationDatasetUri", "hyperParameters", "tuningMode"}
HYPER = {"epochCount", "adapterSize", "learningRateMultiplier"}
STATES = ("PENDING", "RUNNING", "SUCCEEDED")


class VertexStandIn:
    """A context manager; `address` is where it listens.

    Args:
        on_success: gets a job that succeeds, and may put files where it says.
    """

    def __init__(self, on_success: Callable[[dict[str, Any]], None] = lambda job: None) -> None:
        self.token = "secret-token"
        self.states: tuple[str, ...] = STATES
        self.jobs: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.failures: list[int] = []
        """Answers to the next requests: a status; 200: as always; 0 does what is asked, then hangs
        up."""
        self.on_success = on_success
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> VertexStandIn:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        version, _, name = path.partition("?")[0].lstrip("/").partition("/")
        if method == "POST" and name.endswith("/tuningJobs"):
            return self._create(version, name, body)
        if name.endswith("/tuningJobs"):
            return 200, {"tuningJobs": list(self.jobs.values())} if self.jobs else {}
        if name not in self.jobs:
            return 404, {"error": {"message": f"{name} is not found."}}
        return 200, self._later(self.jobs[name])

    def _create(self, version: str, parent: str, body: dict[str, Any]) -> tuple[int, Any]:
        spec = body.get("supervisedTuningSpec", {})
        unknown = {*body} - BODY | {*spec} - SPEC | {*spec.get("hyperParameters", {})} - HYPER
        beta = {"outputUri", "customBaseModel", "tuningMode"} & {*body, *spec}
        if unknown or (beta and version != "v1beta1") or "trainingDatasetUri" not in spec:
            wrong = sorted(unknown | beta)
            return 400, {"error": {"message": f"Invalid JSON payload: unknown names {wrong}"}}
        name = f"{parent}/{len(self.jobs) + 1}"
        self.jobs[name] = {**body, "name": name, "state": "JOB_STATE_QUEUED"}
        return 200, self.jobs[name]

    def _later(self, job: dict[str, Any]) -> dict[str, Any]:
        """Each look finds it one state further."""
        at = job["state"].removeprefix("JOB_STATE_")
        after = (
            self.states[min(self.states.index(at) + 1, len(self.states) - 1)]
            if (at in self.states)
            else self.states[0]
        )
        job["state"] = f"JOB_STATE_{after}"
        if after == "FAILED":
            job["error"] = {"code": 3, "message": "The dataset is too small."}
        if after == "SUCCEEDED":
            place = job["name"].partition("/tuningJobs")[0]
            job["tunedModel"] = {"model": f"{place}/models/7@1", "endpoint": f"{place}/endpoints/9"}
            self.on_success(job)
        return job

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._do("GET", None)

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                self._do("POST", json.loads(self.rfile.read(size)))

            def _do(self, method: str, body: Any) -> None:
                stand_in.requests.append((method, self.path))
                failure = stand_in.failures.pop(0) if stand_in.failures else None
                if failure not in (None, 0, 200):
                    return self._send(failure or 500, {"error": {"message": "not now"}})
                if self.headers["Authorization"] != f"Bearer {stand_in.token}":
                    return self._send(401, {"error": {"message": "no such token"}})
                status, answer = stand_in.answer(method, self.path, body)
                if failure != 0:
                    self._send(status, answer)
                return None

            def _send(self, status: int, answer: Any) -> None:
                with suppress(BrokenPipeError):
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                """Nothing on the tests' output."""

        return Handler

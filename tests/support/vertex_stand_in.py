"""A stand-in of Vertex AI's tuning jobs, as its REST reference describes them: create, get, list.

It refuses what the reference does not have, and can be told to fail for a while. It does not prove
what the service itself does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from email.message import Message
from typing import Any

from .http_stand_in import standing_in

BODY = {
    *("baseModel", "supervisedTuningSpec", "tunedModelDisplayName", "labels", "description"),
    *("outputUri", "customBaseModel"),  # v1beta1 only
}
SPEC = {"trainingDatasetUri", "validationDatasetUri", "hyperParameters", "tuningMode"}
HYPER = {"epochCount", "adapterSize", "learningRateMultiplier"}
STATES = ("PENDING", "RUNNING", "SUCCEEDED")


class VertexStandIn(ExitStack):
    """A context manager; `address` is where it listens.

    Args:
        on_success: gets a job that succeeds, and may put files where it says.
    """

    def __init__(self, on_success: Callable[[dict[str, Any]], None] = lambda job: None) -> None:
        super().__init__()
        self.token = "secret-token"
        self.states: tuple[str, ...] = STATES
        self.jobs: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.failures: list[int] = []
        """Answers to the next requests: a status; 200: as always; 0 does what is asked, then hangs
        up."""
        self.on_success = on_success

    def __enter__(self) -> VertexStandIn:
        self.address = self.enter_context(standing_in(self._heard))
        return super().__enter__()

    def _heard(self, path: str, headers: Message, body: bytes) -> tuple[int, bytes]:
        method = "POST" if body else "GET"
        self.requests.append((method, path))
        failure = self.failures.pop(0) if self.failures else 200
        status, answer = failure, {"error": {"message": "not now"}}
        if failure in (0, 200):
            status, answer = self.answer(method, path, json.loads(body or "null"))
        if headers["Authorization"] != f"Bearer {self.token}":
            status, answer = 401, {"error": {"message": "no such token"}}
        return status if failure else 0, json.dumps(answer).encode()

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

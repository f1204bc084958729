"""The policy version: published by trainers, durable, never decreasing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from envserver_records.errors import ConflictError, NotFoundError
from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from ...settings.section import Described
from ...store import GroupStore
from ..bodies import read_body, request_body
from .answers import answers, json_answer
from .models import PolicyVersionAnswer, PolicyVersionRequest

_POLICY_VERSION: Final = "policy_version"
_VERSION: Final = TypeAdapter(PolicyVersionRequest)


class PolicyVersion:
    """The policy version that trainers publish: durable, never decreasing.

    Args:
        on_change: called with each new version, and with the stored version after a restart.
    """

    def __init__(self, store: GroupStore, on_change: Callable[[int], None] | None) -> None:
        self._store = store
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self.tell_engines: Callable[[Sequence[str], int], Awaitable[None]] = _no_engines
        """Notes that the named engines serve a version; all of them, or none with NotFoundError."""
        self.version = -1

    async def load(self) -> None:
        """Loads the stored version."""
        stored = await self._store.get_value(_POLICY_VERSION)
        if stored is not None:
            self._set(int(stored))

    async def publish(self, version: int, engines: Sequence[str] = ()) -> None:
        """Makes `version` the current version; publishing the current version again is allowed.

        Args:
            engines: ids or addresses of engines that tell their own versions and serve it.
        """
        async with self._lock:
            if version < self.version:
                raise ConflictError(
                    f"The policy version is {self.version} already; {version} is lower.",
                    current=self.version,
                )
            if engines:  # first: an engine that has it must not be taken for an old one
                await self.tell_engines(engines, version)
            if version > self.version:
                await self._store.set_value(_POLICY_VERSION, version)
                self._set(version)

    def _set(self, version: int) -> None:
        self.version = version
        if self._on_change is not None:
            self._on_change(version)


async def _no_engines(named: Sequence[str], version: int) -> None:
    raise NotFoundError(f"This server has no engine {named[0][:100]!r}.")


def add_policy_routes(router: APIRouter, policy: PolicyVersion) -> None:
    @router.post(
        "/v1/policy-version",
        openapi_extra=request_body(PolicyVersionRequest),
        responses=answers(PolicyVersionAnswer, 404, 409, body=True, what="The current version."),
    )
    async def publish(request: Request) -> Response:
        """Sets the version of the weights that the engine samples with from now on. A version lower
        than the current one is refused (409).
        """
        wanted = await read_body(request, _VERSION)
        await policy.publish(wanted.version, wanted.engines or ())
        return json_answer({"version": policy.version})

    @router.get("/v1/policy-version", responses=answers(PolicyVersionAnswer, what="The version."))
    async def current() -> Response:
        """Returns the current policy version; -1 if none was published."""
        return json_answer({"version": policy.version})


class HeldOutEvaluations(Protocol):
    """Runs evaluations, one at a time; see `running.held_out`."""

    @property
    def busy(self) -> bool: ...

    def start(self) -> None:
        """Raises ConflictError if an evaluation runs, or if its split is trained on."""

    def listed(self) -> list[dict[str, Any]]: ...

    async def hold(self, most_seconds: float) -> None:
        """Waits until no evaluation runs, at most as long as the settings let a pause wait."""


class EvaluationsAnswer(Described):
    running: bool
    """Whether one runs, or is about to."""
    evaluations: list[dict[str, Any]]
    """For each: `version` (of the policy, at its start), `state` (running, complete, failed,
    interrupted), `folder`, `results` (numbers by name, `evaluate/math/mean_reward`), `rollouts`,
    `other_versions` (how many of these have tokens of another version), `sampled_by` (rollouts by
    version; several: mixed in one), `began_at`, `ended_at` (seconds since 1970), `error`.
    """


def add_evaluation_routes(router: APIRouter, evaluations: HeldOutEvaluations) -> None:
    @router.post(
        "/v1/evaluations",
        responses=answers(EvaluationsAnswer, 409, status=202, what="It begins."),
    )
    async def evaluate() -> Response:
        """Evaluates the current policy version on the split of `evaluate.split`, beside the
        training rollouts. 409 while another evaluation runs, and if that split is trained on.
        """
        evaluations.start()
        return json_answer(_state(evaluations), 202)

    @router.get("/v1/evaluations", responses=answers(EvaluationsAnswer, what="All evaluations."))
    async def listed() -> Response:
        """Returns the evaluations of this store, the oldest first."""
        return json_answer(_state(evaluations))


def _state(evaluations: HeldOutEvaluations) -> dict[str, Any]:
    return {"running": evaluations.busy, "evaluations": evaluations.listed()}

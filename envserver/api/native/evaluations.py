"""Evaluations of a held-out split, beside the training rollouts.

POST /v1/evaluations   evaluates the current policy version now
GET  /v1/evaluations   all evaluations with their numbers, the oldest first
"""

from __future__ import annotations

from typing import Any, Protocol

from fastapi import APIRouter
from starlette.responses import Response

from ...described import Described
from .answers import answers, json_answer


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

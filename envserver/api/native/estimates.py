"""GET /v1/tasks/estimates: how often each task is solved, as the curriculum estimates it."""

from __future__ import annotations

from typing import Annotated, Any

from envserver_records.records import Split
from fastapi import APIRouter, Query
from starlette.responses import Response

from ...store import GroupStore
from ...store.estimates import EstimateRow
from .answers import answers, json_answer
from .models import MOST_GROUPS, EstimatesAnswer

_NUMBER_LIMIT = 2**63 - 1


def add_estimate_routes(router: APIRouter, store: GroupStore) -> None:
    @router.get(
        "/v1/tasks/estimates",
        responses=answers(EstimatesAnswer, 422, what="A page of estimates."),
    )
    async def list_estimates(
        after: Annotated[
            int, Query(ge=0, le=_NUMBER_LIMIT, description="`number` of the last estimate seen")
        ] = 0,
        limit: Annotated[
            int, Query(ge=1, le=MOST_GROUPS, description="maximum number of estimates")
        ] = 100,
        environment: Annotated[
            str | None,
            Query(max_length=256, pattern=r"^[^\x00]*$", description="only this environment"),
        ] = None,
        split: Annotated[Split | None, Query(description="only this split")] = None,
    ) -> Response:
        """Lists how often the policy solves each task that was ever scored. Stored groups count,
        and so do groups dropped for their rewards or their age; evaluations do not. Tasks come in
        the order in which they were first scored; `next` is the `after` of the following page, null
        on the last page.
        """
        rows = await store.task_estimates(after, limit, env=environment, split=split)
        following = rows[-1].number if len(rows) == limit else None
        return json_answer({"estimates": [_shown(row) for row in rows], "next": following})


def _shown(row: EstimateRow) -> dict[str, Any]:
    estimate = row.estimate
    return {
        "number": row.number,
        "task_id": row.task_id,
        "environment": row.env,
        "split": row.split,
        "attempts": estimate.attempts,
        "mean_reward": estimate.mean_reward,
        "success": estimate.success,
        "weight": estimate.weight,
        "policy_version": estimate.policy_version,
        "scored_at": row.scored_at,
    }

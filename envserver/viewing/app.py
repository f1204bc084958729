"""The application of `envserver view`: the page, and the routes for inspection over any groups.

What holds: nothing that is looked at is changed, and every route is a GET; only this machine's
names are answered, so that no page of another site can read anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from envserver_records.errors import NotFoundError
from fastapi import APIRouter, FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from .. import __version__
from ..api import problems
from ..api.access.middleware import KnownNames
from ..api.access.pages import KnownPages
from ..api.leasing import GroupEncoder
from ..api.live.events import add_event_routes
from ..api.live.failures import FailureLog, add_failure_routes
from ..api.live.feed import Feed
from ..api.native.answers import json_answer
from ..api.native.groups import add_group_routes
from ..api.native.models import MOST_GROUPS
from ..api.native.rollouts import add_rollout_routes
from ..api.native.session import add_session_routes
from ..api.native.tasks_seen import add_task_routes
from ..api.transfer import CompressedAnswers
from ..dashboard import Dashboard
from ..store.interface import ReadGroups
from .evaluations import Evaluations, TaskOrder, TaskSearch

Source = Callable[[], dict[str, Any]]


class ComparisonSearch(BaseModel):
    """Which runs are compared, and which of their tasks are shown."""

    model_config = ConfigDict(extra="forbid")

    a: str = ""
    b: str = ""
    order: TaskOrder = "worst"
    environment: str = ""
    text: str = ""
    cursor: str = ""
    limit: int = Field(100, ge=1, le=MOST_GROUPS)

    def tasks(self) -> TaskSearch:
        """Returns the part about tasks."""
        return TaskSearch(**self.model_dump(exclude={"a", "b"}))


def create_viewer(
    groups: ReadGroups,
    feed: Feed,
    source: Source,
    evaluations: Evaluations | None = None,
    failures: FailureLog | None = None,
) -> FastAPI:
    """Builds the application over groups on disk.

    Args:
        source: returns the answer of GET /v1/source without the version.
        evaluations, failures: None where there are none.
    """
    router = APIRouter()
    encoder = GroupEncoder(groups, most_bytes=0)  # a file may be replaced
    add_rollout_routes(router, groups)  # before that of groups, whose ids may have slashes
    add_group_routes(router, groups, encoder)
    add_task_routes(router, groups)
    add_event_routes(router, feed)
    add_session_routes(router, None)
    if failures is not None:
        add_failure_routes(router, failures)

    @router.get("/v1/source")
    async def get_source() -> Response:
        return json_answer({**source(), "version": __version__})

    @router.get("/v1/evaluations")
    async def get_evaluations() -> Response:
        return json_answer(await _there(evaluations).all())

    @router.get("/v1/comparison")
    async def get_comparison(wanted: Annotated[ComparisonSearch, Query()]) -> Response:
        found = _there(evaluations)
        return json_answer(await found.comparison(wanted.a, wanted.b, wanted.tasks()))

    app = FastAPI(title="envserver view", version=__version__, docs_url=None, redoc_url=None)
    problems.install(app)
    app.include_router(router)
    guard(app)
    return app


def guard(app: FastAPI) -> None:
    """Adds the page, and what protects the reader from pages of other sites."""
    app.add_middleware(CompressedAnswers)
    app.add_middleware(Dashboard)
    app.add_middleware(KnownPages, origins=())
    app.add_middleware(KnownNames, names=())


def _there(evaluations: Evaluations | None) -> Evaluations:
    if evaluations is None:
        raise NotFoundError(
            "There is no evaluation here.", hint="View a folder of `evaluate`, or several runs."
        )
    return evaluations

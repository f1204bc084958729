"""GET /v1/source: what the page looks at, and which of its parts there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal

from fastapi import APIRouter
from starlette.responses import Response

from ... import __version__
from ...described import Described
from .answers import answers, json_answer

_PARTS: Final = ("overview", "groups", "tasks", "runs", "workers", "failures", "alarms")
_OF_ROLLOUTS: Final = ("engines",)
_OF_EVALUATIONS: Final = ("held_out",)
_MOST_NAMED: Final = 3


class SourceAnswer(Described):
    kind: Literal["server", "file", "folder", "store", "evaluation", "comparison"]
    title: str
    """Its title: the environments, or the name of a file."""
    live: bool
    """Whether there is more to come, told by `/v1/events`."""
    parts: list[str]
    """Pages that have something to show."""
    version: str
    """Version of envserver."""
    replay_source: str | None
    """The SOURCE for `envserver replay`; null: this server's own address."""


def add_source_routes(
    router: APIRouter,
    names: Callable[[], Iterable[str]],
    *,
    makes_rollouts: bool,
    evaluated: Callable[[], bool],
) -> None:
    """Adds the route.

    Args:
        names: returns the names of the environments.
        makes_rollouts: whether this server has an engine and makes rollouts itself.
        evaluated: returns whether there are evaluations of held-out tasks.
    """

    @router.get("/v1/source", responses=answers(SourceAnswer, what="What can be looked at."))
    async def source() -> Response:
        """Returns what this server shows: the page has a menu of these parts."""
        return json_answer(
            {
                "kind": "server",
                "title": _title(sorted(names())),
                "live": True,
                "parts": [
                    *_PARTS,
                    *(_OF_ROLLOUTS if makes_rollouts else ()),
                    *(_OF_EVALUATIONS if evaluated() else ()),
                ],
                "version": __version__,
                "replay_source": None,
            }
        )


def _title(names: list[str]) -> str:
    if not names:
        return "envserver"
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

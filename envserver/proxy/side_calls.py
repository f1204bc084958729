"""Tells the side calls of coding programs from their conversation: titles and summaries.

A program's requests without tools, beside a conversation that has tools, are no part of what the
task asks for. They are recorded for the agent "side" and not trained. Since a title may be asked
for before the conversation begins, it is decided when the first request with tools has come.
"""

from __future__ import annotations

from typing import Any

from envserver_records.records import Call

from .model_request import ModelRequest

SIDE = "side"
"""The agent that side calls are recorded for; it is not trained."""


def may_be_side(request: ModelRequest, *, of_program: bool) -> bool:
    """Returns whether `request` is a side call if its agent's conversation has tools.

    Args:
        of_program: whether a coding program sends it. Any other agent may ask without tools on
            purpose, and only an answer that is a title by its JSON schema is taken for one.
    """
    return not request.tools and (of_program or _is_title(request.fields.get("response_format")))


def _is_title(form: Any) -> bool:
    schema = ((form or {}).get("json_schema") or {}).get("schema") or {}
    properties = schema.get("properties")
    return isinstance(properties, dict) and properties.keys() == {"title"}


class SideCalls:
    """The side calls of one attempt."""

    def __init__(self) -> None:
        self._with_tools: set[str | None] = set()
        self._undecided: dict[str | None, list[Call]] = {}

    def asked(self, agent: str | None, request: ModelRequest) -> list[Call]:
        """Notes a request of `agent`; returns the recorded calls that it makes side calls."""
        if not request.tools:
            return []
        self._with_tools.add(agent)
        return self._decided(agent)

    def recorded(self, agent: str | None, calls: list[Call]) -> list[Call]:
        """Notes calls of `agent` that may be side calls; returns those that are."""
        self._undecided.setdefault(agent, []).extend(calls)
        return self._decided(agent) if agent in self._with_tools else []

    def _decided(self, agent: str | None) -> list[Call]:
        calls = self._undecided.pop(agent, [])
        for call in calls:
            call.agent, call.trained = SIDE, False
        return calls

"""What strict rewards ask for besides the task's own criteria: work that shows, and few words."""

from __future__ import annotations

from collections.abc import Sequence

from ..states import calls_with_results
from ..tasks import Criteria, TauMessage, has_text
from .checks import Strictness, action_matches

HAND_OVER = "transfer_to_human_agents"
"""The tool that every domain has for giving up."""

MAX_SAID_CHARACTERS = 20_000
"""What the assistant may say in a whole conversation."""


def is_brief(messages: Sequence[TauMessage]) -> bool:
    """Does the assistant say less than would tell a whole database?"""
    said = sum(len(m["content"]) for m in messages if m["role"] == "assistant" and has_text(m))
    return said <= MAX_SAID_CHARACTERS


def is_proof_of_work(criteria: Criteria, messages: Sequence[TauMessage]) -> bool:
    """Did the assistant look into the matter, where the right thing is to change nothing?

    At least one of the expected actions is done exactly (of handing over, the words do not count);
    where none is expected, at least one call of the assistant succeeds.
    """
    if criteria.actions:
        actions = [
            action.model_copy(update={"compare_args": []}) if action.name == HAND_OVER else action
            for action in criteria.actions
        ]
        return any(action_matches(actions, messages, Strictness.STRICT))
    return any(
        call["requestor"] == "assistant" and not result["error"]
        for call, result in calls_with_results(messages)
    )

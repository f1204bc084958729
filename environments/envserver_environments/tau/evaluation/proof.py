"""Extra conditions of strict rewards: proof of work, and short messages."""

from __future__ import annotations

from collections.abc import Sequence

from ..states import calls_with_results
from ..tasks import Criteria, TauMessage, has_text
from .checks import Strictness, action_matches

HAND_OVER = "transfer_to_human_agents"
"""The tool that every domain has for giving up."""

MAX_SAID_CHARACTERS = 20_000
"""Maximum length of all the assistant's messages in a conversation."""


def is_brief(messages: Sequence[TauMessage]) -> bool:
    """Does the assistant say less than would tell a whole database?"""
    said = sum(len(m["content"]) for m in messages if m["role"] == "assistant" and has_text(m))
    return said <= MAX_SAID_CHARACTERS


def is_proof_of_work(criteria: Criteria, messages: Sequence[TauMessage]) -> bool:
    """Returns whether the assistant looked into the matter, if changing nothing is right.

    At least one of the expected actions is done exactly (for a transfer, the text does not count);
    if none is expected, at least one call of the assistant succeeds.
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

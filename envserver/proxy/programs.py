"""Coding programs, which name themselves in their requests' `user-agent`.

They differ from other agents in two ways. A conversation of theirs only grows, so an equal request
right after an answer is a retry, which they do not mark. And they ask for titles and summaries
beside their conversation (see `side_calls`).
"""

from __future__ import annotations

from .asgi import Scope, header

_NAMES = ("claude-cli/", "codex", "opencode/", "qwencode/")


def is_program(scope: Scope) -> bool:
    """Returns whether a coding program sends this request."""
    return header(scope, b"user-agent").lower().startswith(_NAMES)

"""Exact tokens, in two independent parts (see README.md).

Before a call, messages -> prompt ids, so that a conversation continues from its recorded tokens:
history, comparison, suffix; chat_format, prepare, vocabulary; images.

After a rollout, recorded calls -> training rows: builder, invariants, flags; trace. Only recorded
ids can get into a row, whatever the first part did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .builder import build, find_parents
    from .chat_format import ChatFormat
    from .comparison import classify
    from .flags import DEFAULT, Actions, chosen
    from .history import History, PromptPlan
    from .invariants import check
    from .prepare import Refused
    from .trace import pack_calls

__all__ = [
    "Actions",
    "ChatFormat",
    "DEFAULT",
    "History",
    "PromptPlan",
    "Refused",
    "build",
    "check",
    "chosen",
    "classify",
    "find_parents",
    "pack_calls",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Actions": "flags",
        "ChatFormat": "chat_format",
        "DEFAULT": "flags",
        "History": "history",
        "PromptPlan": "history",
        "Refused": "prepare",
        "build": "builder",
        "check": "invariants",
        "chosen": "flags",
        "classify": "comparison",
        "find_parents": "builder",
        "pack_calls": "trace",
    },
)

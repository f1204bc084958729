"""Exact tokens, in two independent parts (see README.md).

Before a call: messages -> prompt ids, so that a conversation continues from its recorded tokens.

    history      finds the recorded call that a request continues, and plans the prompt
    comparison   classifies agents' edits, and compares the template's rendering with what the
                 model has in its context
    suffix       what a chat template writes after an answer
    chat_format, prepare, vocabulary      a model's chat template and tokenizer
    images       images in prompts, and where the engine put their tokens

After a rollout: recorded calls -> training rows. Only recorded ids can get into a row, whatever the
first part did.

    builder      builds the forest of calls and its rows
    invariants   what always holds of a trajectory
    flags        flags for the unusual, with their actions; the policy version of each token
    trace        stores all calls compactly
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

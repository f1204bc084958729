"""The phrases that the simulated policy puts around an answer; they carry no meaning.

The tokenizer is trained on these phrases: run `make_tokenizer` after a change.
"""

from __future__ import annotations

OPENERS = (
    "Let me work this out.",
    "First, I read the question carefully.",
    "I go through it step by step.",
    "Let me write down what is known.",
    "This can be done directly.",
    "I start with the simplest part.",
    "There is more than one way to do this.",
    "Let me check the details first.",
    "One thing at a time.",
    "That looks manageable.",
    "I will keep this short.",
    "Let me think about what is being asked.",
    "The numbers matter here.",
    "I have seen a similar question before.",
    "Let me be careful with the order.",
    "So, what do we have?",
)
"""Whole sentences put before an answer or a tool call."""

CLOSERS = (
    "As I said:",
    "I stay with my answer.",
    "Nothing has changed:",
    "That was my final answer:",
)
"""Put before the answer when the conversation continues after the answer was given."""

_NOUNS = (
    "answer agent bridge cloud corner engine field garden house island letter lamp market "
    "morning mountain number paper question river road signal stone story table token tower "
    "train valley water window winter world"
)
_VERBS = (
    "asks brings builds changes counts crosses describes ends finds follows gives holds keeps "
    "leaves makes meets needs opens reaches reads remembers shows starts takes turns waits"
)
NOUNS, VERBS = tuple(_NOUNS.split()), tuple(_VERBS.split())
"""Words of arbitrary text."""

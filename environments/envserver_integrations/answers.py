"""How an action is read from a model's answer."""

from __future__ import annotations

import re
from typing import Literal

Answer = Literal["whole", "brackets", "last_line", "tag"]
"""All of an answer, its last [brackets], its last line, or what is in its last <tag>."""
_THOUGHT = "</think>"


def action_of(text: str, answer: Answer, tag: str = "answer") -> str:
    """Returns the action that an answer names, after its thoughts; "" if it names none."""
    said = text.rpartition(_THOUGHT)[2].strip()
    if answer == "brackets":
        named = re.findall(r"\[[^\[\]]*\]", said)
    elif answer == "last_line":
        named = said.splitlines()
    elif answer == "tag":
        named = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", said, re.DOTALL)
    else:
        named = [said]
    return named[-1].strip() if named else ""

"""Answers that go wrong as those of real models do: refusals, repetition, broken calls and JSON.

Pure. In: the turn that would be said, what the request allows, and a random generator. Out: the
text that is said instead. What always holds: with all rates at 0 nothing changes.
"""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

from envserver.settings.config import SimConfig

from .tokenizer import assistant_text, canonical_arguments

REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I cannot assist with this request.",
    "As an AI language model, I am not able to answer this.",
)
_LOOPS = ("The answer is the answer is ", "Wait, let me check that again. ", "0")
_UNDECLARED = "unexpected_argument"


class Said(msgspec.Struct, frozen=True):
    """The text of an assistant turn. `endless`: it is repeated until the request's limit."""

    text: str
    endless: bool = False


class Turn(msgspec.Struct, frozen=True):
    """One assistant message: text, and calls as name and canonical JSON arguments."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        """Returns the turn as the model's text."""
        calls = [{"function": {"name": name, "arguments": text}} for name, text in self.calls]
        return assistant_text({"role": "assistant", "content": self.content, "tool_calls": calls})


def faulty(
    turn: Turn, rates: SimConfig, rng: random.Random, *, tools: dict[str, Any], free: bool
) -> Said | None:
    """Returns what is said instead of `turn`, or None: it is said as it is.

    Args:
        tools: schemas of the offered tools, by name.
        free: the request does not force a call, so a model could write anything.
    """
    # Each rate has its own number, so that one rate does not move what another one hits.
    refuses, repeats, malforms, breaks = (rng.random() for _ in range(4))
    if free and refuses < rates.refusal_rate:
        return Said(rng.choice(REFUSALS))
    if free and repeats < rates.repetition_rate:
        return Said(rng.choice(_LOOPS), endless=True)
    if free and turn.calls and malforms < rates.malformed_call_rate:
        return Said(_malformed(turn, rng, tools))
    if not turn.calls and breaks < rates.broken_json_rate and _is_json(turn.content):
        return Said(_broken(turn.content, rng))
    return None


def _malformed(turn: Turn, rng: random.Random, tools: dict[str, Any]) -> str:
    """Spoils the form of the last call: its tags or JSON, its tool's name, or its arguments."""
    *others, (name, arguments) = turn.calls
    kind = rng.choice(("text", "name", "arguments"))
    if kind == "text":
        # Cut inside the arguments: no parser finds a call in it, and agents see plain text.
        text = turn.text()
        return text[: text.rindex(arguments) + rng.randrange(len(arguments))]
    if kind == "name":
        wrong = (f"{name}_{rng.randint(2, 9)}", arguments)
    else:
        wrong = (name, _wrong_arguments(json.loads(arguments), tools.get(name) or {}, rng))
    return Turn(turn.content, (*others, wrong)).text()


def _wrong_arguments(arguments: dict[str, Any], schema: dict[str, Any], rng: random.Random) -> str:
    """Leaves out a required argument, or else adds one that the tool does not have."""
    required = [name for name in schema.get("required") or () if name in arguments]
    if required:
        left_out = rng.choice(required)
        return canonical_arguments({k: v for k, v in arguments.items() if k != left_out})
    return canonical_arguments({**arguments, _UNDECLARED: None})


def _is_json(content: str) -> bool:
    return content.lstrip().startswith(("{", "["))


def _broken(content: str, rng: random.Random) -> str:
    """Returns JSON that no parser accepts: cut off, or with a comma too many."""
    text = content.rstrip()
    if rng.random() < 0.5:
        return text[: rng.randrange(1, len(text))]
    return f"{text[:-1]},{text[-1]}"

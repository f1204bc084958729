"""The judge of assertions in natural language (NL_ASSERTION), asked by the scorer.

In: a finished conversation and the task's assertions. Out: whether each is met, in order. A judge
without a valid answer after some tries is an infrastructure failure (JudgeError): scoring is tried
again, then the rollout is dropped, never scored 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import BaseModel, ValidationError

from envserver import Judge

from .prompts import judge_messages
from .tasks import TauMessage


class _Verdict(BaseModel):
    met: bool


class _Verdicts(BaseModel):
    results: list[_Verdict]


def verdicts(judge: Judge, assertions: Sequence[str], messages: Sequence[TauMessage]) -> list[bool]:
    """Returns whether each assertion is met; without assertions no model is called."""
    if not assertions:
        return []
    asked = judge_messages(assertions, messages)
    return judge.ask_blocking(asked, lambda text: read_verdicts(text, len(assertions)))


def read_verdicts(text: str, count: int) -> list[bool]:
    """Parses the verdicts in an answer; raises ValueError if they are invalid or not `count`."""
    start, end = text.find("{"), text.rfind("}")
    try:
        read = _Verdicts.model_validate(json.loads(text[start : end + 1]), strict=True)
    except (ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if len(read.results) != count:
        raise ValueError(f"{len(read.results)} verdicts, not {count}")
    return [one.met for one in read.results]

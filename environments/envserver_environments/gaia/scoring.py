"""The score of a rollout: its answer by GAIA's official rules, and how it came about. Pure.

The truth alone decides how an answer is compared: as a number if it is one, else as a list if
it has a comma or a semicolon, else as text. There is no partial credit and no tolerance.
"""

from __future__ import annotations

import dataclasses
import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from envserver_tools.web import LEAK_SEEN
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, model_validator

from envserver import Message, Result, Score, Task

from .agents.prompts import FAILED, NO_CALL, NO_CODE, PLAN, PLANNED, TOOL_FAILED

if TYPE_CHECKING:
    from .env import Gaia

MAX_ANSWER_CHARACTERS = 10_000
"""Longer answers are wrong."""

_MARKER = re.compile(r"final answer:", re.IGNORECASE)
_SEPARATOR = re.compile(r"[,;]")
_SPACE = re.compile(r"\s")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WRAPPERS = (("**", "**"), ("[", "]"), ('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"))


def question_scorer(model_answer: Any, ground_truth: str) -> bool:
    """Returns the official verdict. It does not strip "FINAL ANSWER:"; see `extract_answer`.
    Numbers and lists become text, anything else is wrong."""
    answer = as_text(model_answer)
    if answer is None:
        return False
    if is_number(ground_truth):
        return _number(answer) == float(ground_truth)
    if _SEPARATOR.search(ground_truth):
        return _same_lists(_SEPARATOR.split(answer), _SEPARATOR.split(ground_truth))
    return _normalised(answer) == _normalised(ground_truth)


def leaderboard_verdict(submitted: Any, ground_truth: str) -> bool:
    """Returns the verdict of GAIA's leaderboard on the submitted text as it is: what
    `extract_answer` takes off makes it wrong, and so does a list, since a line there is a text or a
    number."""
    return isinstance(submitted, str | int | float) and question_scorer(submitted, ground_truth)


def extract_answer(output: Any) -> str | None:
    """Returns the text after the last "FINAL ANSWER:", or all of it, without one pair of brackets,
    quotes or double stars around it."""
    answer = _submitted(output)
    return answer if answer and len(answer) <= MAX_ANSWER_CHARACTERS else None


def is_too_long(output: Any) -> bool:
    return len(_submitted(output)) > MAX_ANSWER_CHARACTERS


def _submitted(output: Any) -> str:
    return _unwrapped(_MARKER.split(as_text(output) or "")[-1].strip())


def as_text(value: Any) -> str | None:
    """Converts an answer to text; None for None, sets, mappings and objects."""
    match value:
        case str():
            return value
        case bool() | int() | float():
            return _text_of_number(value)
        case list() | tuple():
            parts = [as_text(part) for part in value]
            return None if None in parts else ", ".join(part for part in parts if part is not None)
    return None


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_usable_truth(truth: str) -> bool:
    """Returns whether answers can be compared with it: by the rules any text equals the number
    "inf", none equals "nan", and only punctuation equals the empty text."""
    if is_number(truth):
        return math.isfinite(float(truth))
    return bool(_normalised(truth))


def _text_of_number(value: float) -> str | None:
    try:
        return str(value)
    except ValueError:  # an integer with thousands of digits
        return None


def _unwrapped(answer: str) -> str:
    for start, end in _WRAPPERS:
        inner = answer[len(start) : -len(end)]
        if (
            len(answer) > len(start) + len(end)
            and answer.startswith(start)
            and answer.endswith(end)
            and start not in inner
            and end not in inner
        ):
            return inner.strip()
    return answer


def _number(text: str) -> float:
    for character in "$%,":
        text = text.replace(character, "")
    try:
        return float(text)
    except ValueError:
        return math.inf


def _same_lists(answers: list[str], truths: list[str]) -> bool:
    return len(answers) == len(truths) and all(
        _number(answer) == float(truth) if is_number(truth) else _folded(answer) == _folded(truth)
        for answer, truth in zip(answers, truths, strict=True)
    )


def _folded(text: str) -> str:
    return _SPACE.sub("", text).lower()


def _normalised(text: str) -> str:
    return _folded(text).translate(_WITHOUT_PUNCTUATION)


# The reward depends on whether the answer is right, on counts made by the proxy (model calls,
# sampled tokens) and on typed outcomes of the agent's steps; never on the text of a message or a
# page. Always:
#
# - every right answer has a higher reward than every wrong one, whatever else happened;
# - for a wrong one neither steps nor tokens count: giving up and stalling pay nothing;
# - the reward never grows with steps, tokens, unusable messages or errors;
# - an item of weight 0 changes nothing.

LEAST = -0.1
MOST_OF_ALL_WEIGHTS = 0.5


class Weights(BaseModel):
    """Deductions for each item."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    steps: NonNegativeFloat = 0.05
    """Penalty for a correct answer that used all model calls."""
    tokens: NonNegativeFloat = 0.05
    """Penalty for a correct answer that used all tokens."""
    format: NonNegativeFloat = 0.05
    """Penalty if no step could be parsed (unusable messages, invalid tool calls)."""
    errors: NonNegativeFloat = 0.05
    """Penalty if every step ended in a code or tool error."""
    ungrounded: NonNegativeFloat = 0.0
    """Penalty for a correct answer that appeared in no observation."""
    free_share: float = Field(default=0.25, ge=0, lt=1)
    """Share of calls and tokens without a penalty."""
    free_errors: NonNegativeInt = 2
    """Number of code and tool errors without a penalty."""

    @model_validator(mode="after")
    def _right_beats_wrong(self) -> Weights:
        total = self.steps + self.tokens + self.format + self.errors + self.ungrounded
        if total > MOST_OF_ALL_WEIGHTS:
            raise ValueError(f"the weights add up to {total:g}, over {MOST_OF_ALL_WEIGHTS}")
        return self


@dataclass(frozen=True)
class Facts:
    """Facts about a rollout."""

    correct: bool
    turns: int = 0  # by the proxy's count, as `tokens`
    turn_limit: int = 1
    tokens: int = 0
    token_limit: int = 1
    steps: int = 0
    malformed: int = 0  # steps that could not be read
    failed: int = 0  # steps that raised
    grounded: bool = True  # the answer occurred in an observation


@dataclass(frozen=True)
class Items:
    """The value of each item, in [0, 1]; 0 is best for all but `correct`."""

    correct: float
    steps: float
    tokens: float
    format: float
    errors: float
    ungrounded: float


def items(facts: Facts, weights: Weights) -> Items:
    return Items(
        correct=float(facts.correct),
        steps=_beyond(facts.turns, facts.turn_limit, weights.free_share),
        tokens=_beyond(facts.tokens, facts.token_limit, weights.free_share),
        format=_share(facts.malformed, facts.steps),
        errors=_share(facts.failed - weights.free_errors, facts.steps),
        ungrounded=float(not facts.grounded),
    )


def fold(found: Items, weights: Weights) -> float:
    """The reward in [-0.1, 1]: right at least 1 less all weights, wrong at most 0."""
    right = found.correct * (
        1.0
        - weights.steps * found.steps
        - weights.tokens * found.tokens
        - weights.ungrounded * found.ungrounded
    )
    reward = right - weights.format * found.format - weights.errors * found.errors
    return min(1.0, max(LEAST, reward))


def _beyond(used: int, limit: int, free: float) -> float:
    allowed = free * limit
    return min(1.0, max(0.0, (used - allowed) / max(limit - allowed, 1.0)))


def _share(part: int, whole: int) -> float:
    return min(1.0, max(0.0, part / max(whole, 1)))


# The agent's process writes a trace for people; the model's code might falsify it, so no reward
# depends on it. Here the conversation counts: the model read each step's outcome in the next
# request, in forms that only the agent writes (the first line of an observation, the first word of
# a tool's result), never in a program's output or a page's text. Steps that are missing in it,
# though the proxy counted their calls, count as malformed.


@dataclass(frozen=True)
class Trail:
    """The steps of an agent, without plans."""

    steps: int = 0
    malformed: int = 0  # had neither code nor a call, or are missing in the recording
    failed: int = 0  # the other steps whose code or tools failed
    observed: str = ""  # all observations that the model read


def trail_of(messages: Sequence[Message], turns: int) -> Trail:
    replies = [[*map(_text, reply)] for plan, reply in _turns(messages) if not plan]
    missing = max(0, turns - sum(message.get("role") == "assistant" for message in messages))
    ended = Counter(map(_outcome, replies))
    return Trail(
        steps=len(replies) + missing,
        malformed=ended["malformed"] + missing,
        failed=ended["failed"],
        observed="\n".join(text for reply in replies for text in reply),
    )


def _turns(messages: Sequence[Message]) -> Iterator[tuple[bool, list[Message]]]:
    starts = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    ends = [*starts, len(messages)][1:]
    for at, end in zip(starts, ends, strict=True):
        reply = list(messages[at + 1 : end])
        prompt = _text(messages[at - 1]) if at else ""
        planned = bool(reply) and _text(reply[0]).startswith(PLANNED)
        yield planned or prompt.endswith(PLAN), reply


def _outcome(reply: list[str]) -> Literal["fine", "malformed", "failed"]:
    if any(text.startswith((NO_CODE, NO_CALL)) for text in reply):
        return "malformed"
    return "failed" if any(text.startswith((FAILED, TOOL_FAILED)) for text in reply) else "fine"


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


_TELLING_CHARACTERS = 16
"""An author's id of this length occurs only in copies of the data set."""

Unfinished = Literal["score", "drop"]
Contaminated = Literal["drop", "zero", "score"]


def judge(task: Task, result: Result, config: Gaia.Config) -> Score:
    output = result.output if isinstance(result.output, dict) else {}
    submitted = output.get("answer")
    answer, too_long = extract_answer(submitted), is_too_long(submitted)
    answered = answer is not None or too_long
    trail = trail_of(result.messages, result.turns)
    facts = Facts(
        correct=answer is not None and question_scorer(answer, str(task.hidden["answer"])),
        turns=result.turns,
        turn_limit=config.max_turns,
        tokens=result.completion_tokens,
        token_limit=config.max_completion_tokens,
        steps=trail.steps,
        malformed=trail.malformed,
        failed=trail.failed,
        grounded=answer is not None and _was_observed(answer, trail.observed),
    )
    found = items(facts, config.rubric)
    folded = fold(found, config.rubric)
    leaked = _was_leaked(task, result, trail)
    return Score(
        reward=_reward(folded, config, answered=answered, leaked=leaked),
        components=dataclasses.asdict(found),
        metrics={
            "folded": folded,
            "leaderboard_correct": float(
                leaderboard_verdict(submitted, str(task.hidden["answer"]))
            ),
            "level": float(task.hidden["level"]),
            "answered": float(answered),
            "too_long": float(too_long),
            "agent_steps": float(facts.steps),
            "contaminated": float(leaked),
        },
    )


def _reward(folded: float, config: Gaia.Config, *, answered: bool, leaked: bool) -> float | None:
    if leaked and config.contaminated != "score":
        return None if config.contaminated == "drop" else 0.0
    if not answered and config.unfinished == "drop":
        return None
    return max(0.0, folded)


def _was_leaked(task: Task, result: Result, trail: Trail) -> bool:
    """Returns whether the agent saw a copy of its task (by the web service or its id)."""
    name = str(task.hidden.get("task_id") or "")
    named = len(name) >= _TELLING_CHARACTERS and name.casefold() in trail.observed.casefold()
    return named or LEAK_SEEN in result.flags


def _was_observed(answer: str, observed: str) -> bool:
    seen = observed.casefold()
    return all(part.strip().casefold() in seen for part in answer.split(","))

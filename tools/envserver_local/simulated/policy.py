"""Decides what the simulated model says next: a script with random choices, not a language model.

Invariants: the same seed, key and conversation give the same text; the text holds no special token;
unless a fault is drawn, calls name a tool of the request and have canonical arguments.

With a demonstration the policy plays it turn by turn, in words of its own around it, and answers
right with the configured probability; else the last turn's answer is spoiled. Without one it
babbles. With a probability of its own, an answer goes wrong as those of real models do: refusals,
repetition, broken calls and JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import string
import tomllib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from envserver_records.records import Json, Message

from envserver.settings.config import SimConfig

from . import ASSETS
from .tokenizer import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    Conversation,
    assistant_text,
    canonical_arguments,
    refusal,
)

_PHRASES = tomllib.loads((ASSETS / "phrases.toml").read_text(encoding="utf-8"))
OPENERS, CLOSERS, REFUSALS = (_PHRASES[name] for name in ("openers", "closers", "refusals"))
NOUNS, VERBS = _PHRASES["nouns"].split(), _PHRASES["verbs"].split()
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
        calls = [{"function": {"name": name, "arguments": text}} for name, text in self.calls]
        return assistant_text({"role": "assistant", "content": self.content, "tool_calls": calls})


def faulty(
    turn: Turn, rates: SimConfig, rng: random.Random, *, tools: Json, free: bool
) -> Said | None:
    """What is said instead of `turn`, or None: it is said as it is.

    `tools`: schemas of the offered tools, by name. `free`: the request does not force a call, so a
    model could write anything.
    """
    # Each rate has its own number, so that one rate does not move what another one hits.
    refuses, repeats, malforms, breaks = (rng.random() for _ in range(4))
    if free and refuses < rates.refusal_rate:
        return Said(rng.choice(REFUSALS))
    if free and repeats < rates.repetition_rate:
        return Said(rng.choice(_PHRASES["loops"]), endless=True)
    if free and turn.calls and malforms < rates.malformed_call_rate:
        return Said(_malformed(turn, rng, tools))
    if not turn.calls and breaks < rates.broken_json_rate and _is_json(turn.content):
        return Said(_broken(turn.content, rng))
    return None


def _malformed(turn: Turn, rng: random.Random, tools: Json) -> str:
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


def _wrong_arguments(arguments: Json, schema: Json, rng: random.Random) -> str:
    """Leaves out a required argument, or else adds one that the tool does not have."""
    required = [name for name in schema.get("required") or () if name in arguments]
    if required:
        left_out = rng.choice(required)
        return canonical_arguments({k: v for k, v in arguments.items() if k != left_out})
    return canonical_arguments({**arguments, _UNDECLARED: None})


def _is_json(content: str) -> bool:
    return content.lstrip().startswith(("{", "["))


def _broken(content: str, rng: random.Random) -> str:
    """JSON that no parser accepts: cut off, or with a comma too many."""
    text = content.rstrip()
    if rng.random() < 0.5:
        return text[: rng.randrange(1, len(text))]
    return f"{text[:-1]},{text[-1]}"


_REMEMBERED_TEXTS = 4096


class Solution(msgspec.Struct, frozen=True):
    """A demonstration: the assistant's messages, one per turn.

    `exact`: they are played word for word, with no sentence before or after them.
    """

    turns: list[Message]
    exact: bool = False


class Solver(Protocol):
    def solve(self, messages: list[Message], rollout_id: str) -> Solution | None:
        """The demonstration of a conversation's task, or None if none is known.

        `rollout_id` is "" for requests from outside. Called for every request on the event loop, so
        it must be fast.
        """


class RolloutSolver:
    """Demonstrations by rollout, assigned by the code that starts the rollouts."""

    def __init__(self) -> None:
        self._solutions: dict[str, Solution] = {}

    def assign(self, rollout_id: str, turns: list[Message] | None, *, exact: bool = False) -> None:
        """None: the rollout has no demonstration. `exact`: see Solution."""
        if turns:
            self._solutions[rollout_id] = Solution(turns, exact)
        else:
            self.forget(rollout_id)

    def forget(self, rollout_id: str) -> None:
        self._solutions.pop(rollout_id, None)

    def solve(self, messages: list[Message], rollout_id: str) -> Solution | None:
        return self._solutions.get(rollout_id)


class TextSolver:
    """Demonstrations by the question's text, which must occur in a user's message.

    The last user message with a known question decides, and in it the question that ends last (a
    prompt may show others as examples), the longer of two that end together. Of equal questions the
    last counts, empty ones do not.
    """

    def __init__(self, tasks: Iterable[tuple[str, list[Message]]], *, exact: bool = False) -> None:
        self._solutions = {
            text.strip(): Solution(turns, exact) for text, turns in tasks if text.strip()
        }
        # Questions by their last characters, so that a message is searched for all of them at once.
        self._by_ending: dict[int, dict[str, list[str]]] = {}
        for question in sorted(self._solutions, key=len, reverse=True):
            length = min(len(question), 24)
            endings = self._by_ending.setdefault(length, {})
            endings.setdefault(question[-length:], []).append(question)
        self._last_question = lru_cache(_REMEMBERED_TEXTS)(self._find_last_question)

    def solve(self, messages: list[Message], rollout_id: str) -> Solution | None:
        for message in reversed(messages):
            if message.get("role") == "user":
                question = self._last_question(str(message.get("content") or ""))
                if question is not None:
                    return self._solutions[question]
        return None

    def _find_last_question(self, text: str) -> str | None:
        for end in range(len(text), 0, -1):
            here = [
                question
                for length, endings in self._by_ending.items()
                if length <= end
                for question in endings.get(text[end - length : end], ())
                if text.endswith(question, 0, end)
            ]
            if here:
                return max(here, key=len)
        return None


_BABBLED_TURNS = 6
"""After this many turns without a demonstration the policy calls no more tools."""
_NOT_PROSE = ("{", "[", "<")
"""Answers that begin like this are read by programs: nothing is put before them."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Constraints on an answer.

    `choice`: "none", "auto", "required" or the name of a tool that must be called. `parallel`:
    several calls in one turn are allowed. `response_format`: OpenAI's field.
    """

    rollout_id: str = ""
    choice: str = "none"
    parallel: bool = True
    response_format: Json | None = None


class Speaker(Protocol):
    """Says the assistant's turns: the Policy, a transcript, or a person."""

    def say(self, conversation: Conversation, wish: Wish, *, fate: str, key: str) -> Said: ...


class Policy:
    def __init__(self, config: SimConfig, solver: Solver | None) -> None:
        self._seed = config.seed
        self._config = config
        self._solver = solver

    def say(self, conversation: Conversation, wish: Wish, *, fate: str, key: str) -> Said:
        """`fate` decides whether the task is solved; equal for all turns of a rollout. `key`
        decides the wording."""
        rng = generator(self._seed, "words", key)
        tools = _callable_tools(conversation, wish)
        solution = self._solution(conversation, wish)
        if solution is not None:
            turn = self._played(solution, conversation.turn(), tools, wish, fate, rng)
        else:
            turn = _babble(conversation.turn(), tools, wish, rng)
        free = wish.choice in ("none", "auto")
        if not free and not turn.calls:
            turn = Turn(turn.content, (_drawn_call(tools, rng),))
        if not wish.parallel:
            turn = Turn(turn.content, turn.calls[:1])
        chance = generator(self._seed, "faulty", key)
        said = faulty(turn, self._config, chance, tools=tools, free=free) or Said(turn.text())
        return Said(without_specials(said.text), said.endless)

    def _solution(self, conversation: Conversation, wish: Wish) -> Solution | None:
        if self._solver is None:
            return None
        solution = self._solver.solve(conversation.messages, wish.rollout_id)
        return solution if solution is not None and solution.turns else None

    def _played(
        self,
        solution: Solution,
        index: int,
        tools: Json,
        wish: Wish,
        fate: str,
        rng: random.Random,
    ) -> Turn:
        script = playable([_turn(message) for message in solution.turns], set(tools))
        last = len(script) - 1
        turn = script[min(index, last)]
        if index >= last and not self._solves(fate):
            turn = spoiled(turn, generator(self._seed, "spoil", fate), tools)
        if index > last:
            said = as_text(turn)
            return Turn(said if solution.exact else f"{rng.choice(CLOSERS)}\n{said}")
        exact = solution.exact or not self._config.openers or wish.response_format
        return turn if exact else worded(turn, rng)

    def _solves(self, fate: str) -> bool:
        return generator(self._seed, "solve", fate).random() < self._config.solve_probability


def generator(seed: int, purpose: str, key: str) -> random.Random:
    """A random generator that is the same on every machine for the same arguments."""
    digest = hashlib.blake2b(f"{seed}|{purpose}|{key}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "little"))


def playable(turns: list[Turn], names: set[str]) -> list[Turn]:
    """The turns that can be played with these tools.

    A turn that calls another tool is left out, except the last, which then says its answer.
    """
    kept = [turn for turn in turns[:-1] if _callable(turn, names)]
    final = turns[-1]
    return [*kept, final if _callable(final, names) else Turn(as_text(final))]


def as_text(turn: Turn) -> str:
    """A turn without calls: `finish(answer=...)` becomes `\\boxed{...}`."""
    if not turn.calls or "\\boxed{" in turn.content:
        return turn.content
    arguments = json.loads(turn.calls[-1][1])
    if isinstance(arguments, dict) and "answer" in arguments:
        answer = f"\\boxed{{{arguments['answer']}}}"
        return f"{turn.content}\n{answer}" if turn.content else answer
    return turn.content or json.dumps(arguments, ensure_ascii=False)


def spoiled(turn: Turn, rng: random.Random, tools: Json) -> Turn:
    """The turn with a wrong answer: in its last call, or else in its text.

    Wrong arguments are still valid for the call's tool.
    """
    if not turn.calls:
        return Turn(spoiled_text(turn.content, rng))
    *others, (name, arguments) = turn.calls
    wrong = canonical_arguments(
        spoiled_arguments(json.loads(arguments), rng, tools.get(name) or {})
    )
    content = spoiled_text(turn.content, rng) if "\\boxed{" in turn.content else turn.content
    return Turn(content, (*others, (name, wrong)))


def worded(turn: Turn, rng: random.Random) -> Turn:
    """The turn with up to three sentences before it, on a separate line."""
    if turn.content.startswith(_NOT_PROSE):
        return turn
    openers = rng.sample(OPENERS, rng.choice((0, 1, 1, 2, 2, 3)))
    lines = [" ".join(openers), turn.content]
    return Turn("\n".join(line for line in lines if line), turn.calls)


def drawn_call(
    conversation: Conversation, wish: Wish, rng: random.Random
) -> tuple[str, str] | None:
    """A call of one of the offered tools with valid arguments; None without tools."""
    tools = _callable_tools(conversation, wish)
    return _drawn_call(tools, rng) if tools else None


def without_specials(text: str) -> str:
    """`text` without anything that would become a special token."""
    while any(special in text for special in (END_OF_TEXT, IM_START, IM_END)):
        for special in (END_OF_TEXT, IM_START, IM_END):
            text = text.replace(special, "")
    return text


def _turn(message: Message) -> Turn:
    try:
        calls = tuple(
            (call["function"]["name"], canonical_arguments(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
        text = f"{message.get('content') or ''}"
        "".join([text, *(part for call in calls for part in call)]).encode()
        return Turn(text, calls)
    except (ValueError, KeyError, TypeError) as error:
        raise refusal(f"The demonstration has a message that cannot be sent: {error}") from error


def _callable(turn: Turn, names: set[str]) -> bool:
    return all(name in names for name, _ in turn.calls)


def _callable_tools(conversation: Conversation, wish: Wish) -> Json:
    if wish.choice == "none":
        return {}
    schemas = {
        tool["function"]["name"]: {"type": "object", **(tool["function"].get("parameters") or {})}
        for tool in conversation.tools
    }
    if wish.choice in schemas:
        return {wish.choice: schemas[wish.choice]}
    return schemas


def _babble(index: int, tools: Json, wish: Wish, rng: random.Random) -> Turn:
    if wish.response_format and wish.response_format.get("type", "text") != "text":
        return Turn(_json_babble(wish.response_format, rng))
    sentences = [
        f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}."
        for _ in range(rng.randint(1, 5))
    ]
    calls = []
    if tools and index < _BABBLED_TURNS and rng.random() < 0.5:
        calls = [_drawn_call(tools, rng) for _ in range(2 if rng.random() < 0.15 else 1)]
        sentences = sentences[: rng.randint(0, 2)]
    return Turn(" ".join(sentences), tuple(calls))


def _json_babble(response_format: Json, rng: random.Random) -> str:
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    return json.dumps(
        _drawn(schema or {"type": "object"}, rng, "response_format"), ensure_ascii=False
    )


def _drawn_call(tools: Json, rng: random.Random) -> tuple[str, str]:
    name = rng.choice(list(tools))
    arguments = _drawn(tools[name], rng, f"tools: {name}")
    if not isinstance(arguments, dict):
        raise refusal(f"The parameters of {name!r} describe no object.", param="tools")
    return name, canonical_arguments(arguments)


def _drawn(schema: Any, rng: random.Random, place: str) -> Any:
    try:
        return drawn_value(schema, rng)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise refusal(f"This is not a usable JSON schema: {error}", param=place) from error


# Values for a schema, wrong answers.

_OPTIONAL_DEPTH = 6
"""Below this depth optional values are left out."""
_MAX_DEPTH = 32
_MAX_VALUES = 2000
_MAX_CHARACTERS = 4000
_MAX_STEPS = 8


def drawn_value(schema: Any, rng: random.Random) -> Any:
    """Draws a small value for `schema`; the same state of `rng` gives the same value.

    Covered: type, enum, const, properties, required, items, minItems, string lengths, numeric
    bounds, multipleOf, anyOf/oneOf (the first), allOf (merged), local $ref and common formats of
    text (dates, addresses, ids). `pattern` is not.
    """
    return _Drawer(schema if isinstance(schema, dict) else {}, rng).draw(schema, 0)


class _Drawer:
    def __init__(self, root: Json, rng: random.Random) -> None:
        self._root = root
        self._rng = rng
        self._left = _MAX_VALUES

    def draw(self, schema: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise ValueError("it asks for too many values, or for values within values without end")
        schema = self._resolved(schema if isinstance(schema, dict) else {})
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._rng.choice(schema["enum"])
        match _kind(schema):
            case "object":
                return self._object(schema, depth)
            case "array":
                count = int(schema.get("minItems", 1 if depth < _OPTIONAL_DEPTH else 0))
                items = schema.get("items", {})
                return [self.draw(items, depth + 1) for _ in range(count)]
            case "integer" | "number" as kind:
                return self._number(schema, whole=kind == "integer")
            case "boolean":
                return self._rng.random() < 0.5
            case "null":
                return None
        return self._string(schema)

    def _resolved(self, schema: Json) -> Json:
        for _ in range(_MAX_STEPS):
            branch = schema.get("anyOf") or schema.get("oneOf")
            if isinstance(schema.get("$ref"), str):
                schema = _referenced(schema["$ref"], self._root)
            elif isinstance(branch, list) and isinstance(branch[0], dict):
                schema = branch[0]
            elif isinstance(schema.get("allOf"), list):
                rest = {key: value for key, value in schema.items() if key != "allOf"}
                parts = [part for part in schema["allOf"] if isinstance(part, dict)]
                schema = _merged([rest, *parts])
            else:
                break
        return schema

    def _object(self, schema: Json, depth: int) -> Json:
        properties = schema.get("properties", {})
        required = set(schema.get("required", []))
        chosen = [
            name
            for name in properties
            if name in required or (depth < _OPTIONAL_DEPTH and self._rng.random() < 0.3)
        ]
        drawn = {name: self.draw(properties[name], depth + 1) for name in chosen}
        unknown = sorted(required - set(properties))
        return drawn | {name: self._rng.choice(NOUNS) for name in unknown}

    def _number(self, schema: Json, *, whole: bool) -> int | float:
        step = schema.get("multipleOf", 1 if whole else 0.5)
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is None:
            low = 0 if high is None else high - 20 * step
        first = math.ceil(low / step)
        if first * step == schema.get("exclusiveMinimum"):
            first += 1
        last = first + 20 if high is None else max(first, math.floor(high / step))
        if last > first and last * step == schema.get("exclusiveMaximum"):
            last -= 1
        value = self._rng.randint(first, min(last, first + 20)) * step
        return int(value) if whole else float(value)

    def _string(self, schema: Json) -> str:
        if values := _PHRASES["formats"].get(schema.get("format")):
            return str(self._rng.choice(values))
        text = " ".join(self._rng.choice(NOUNS) for _ in range(self._rng.randint(1, 4)))
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
        if shortest > _MAX_CHARACTERS:
            raise ValueError(f"it asks for a text of {shortest} characters")
        while len(text) < shortest:
            text = f"{text} {self._rng.choice(NOUNS)}"
        return text if longest is None else text[: int(longest)]


def _kind(schema: Json) -> Any:
    kind = schema.get("type") or ("object" if "properties" in schema else "string")
    if isinstance(kind, list):
        return next((name for name in kind if name != "null"), "null")
    return kind


def _referenced(reference: str, root: Json) -> Json:
    target: Any = root
    for step in reference.removeprefix("#").removeprefix("/").split("/"):
        if step:
            target = target.get(step) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else {}


def _merged(parts: list[Json]) -> Json:
    merged: Json = {}
    for part in parts:
        merged |= part | {
            "properties": {**merged.get("properties", {}), **part.get("properties", {})},
            "required": [*merged.get("required", []), *part.get("required", [])],
        }
    return {key: value for key, value in merged.items() if value not in ({}, [])}


_MOST_DRAWS = 8
"""Values that are drawn from a schema until one differs and is allowed."""
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_WORD = re.compile(r"[^\W\d_]+")
_COMMAND_OR_WORD = re.compile(r"\\[a-zA-Z]+|[^\W\d_]+")
_BOXED = "\\boxed{"


def spoiled_text(text: str, rng: random.Random) -> str:
    r"""`text` with a wrong last `\\boxed{}`, or else last number, or else last word."""
    span = _last_boxed(text)
    if span is None:
        span = _last_answer(text)
    start, end = span
    return text[:start] + spoiled_answer(text[start:end], rng) + text[end:]


def spoiled_answer(answer: str, rng: random.Random) -> str:
    """An answer of the same form that never equals `answer`, as text or as a number."""
    lower = answer.strip().lower()
    if lower in _OPPOSITES:
        return _OPPOSITES[lower]
    digits = [match.start() for match in re.finditer("[0-9]", answer)]
    if digits:
        return _with_other_digit(answer, digits[0], rng)
    words = [m for m in _COMMAND_OR_WORD.finditer(answer) if not m.group().startswith("\\")]
    if words:
        return _with_other_letter(answer, words[0], rng)
    return f"{answer}{rng.choice('123456789')}"


def spoiled_arguments(arguments: Json, rng: random.Random, schema: Json | None = None) -> Json:
    """A call's arguments with a wrong `answer`, or else a wrong longest value.

    A wrong value that `schema` does not allow is drawn from it; if it allows no other, the next
    longest value is made wrong.
    """
    names = sorted(arguments, key=lambda name: (name != "answer", -len(str(arguments[name]))))
    for name in names:
        wrong = {**arguments, name: _spoiled_value(arguments[name], rng)}
        if not schema or is_valid(wrong, schema):
            return wrong
        declared = (schema.get("properties") or {}).get(name)
        for value in _other_values(declared, arguments[name], rng):
            if is_valid({**arguments, name: value}, schema):
                return {**arguments, name: value}
    return arguments


def is_valid(arguments: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Whether the schema allows the arguments; a schema that is broken allows anything."""
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(schema)
        return bool(Draft202012Validator(schema).is_valid(arguments))
    except (SchemaError, RecursionError):
        return True


def _other_values(schema: Any, value: Any, rng: random.Random) -> Iterator[Any]:
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        others = [choice for choice in schema["enum"] if choice != value]
        yield from rng.sample(others, len(others))
        return
    for _ in range(_MOST_DRAWS):
        try:
            drawn = drawn_value(schema, rng)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
            return  # an unusual schema: this value stays right
        if drawn != value:
            yield drawn


def _spoiled_value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.randint(1, 9)
    if isinstance(value, str):
        return spoiled_answer(value, rng)
    if isinstance(value, list) and value:
        return [_spoiled_value(value[0], rng), *value[1:]]
    if isinstance(value, dict):
        return spoiled_arguments(value, rng)
    return value


def _with_other_digit(answer: str, place: int, rng: random.Random) -> str:
    old = answer[place]
    # A leading digit that became 0 would change how the number is written, not only its value.
    new = rng.choice([digit for digit in "123456789" if digit != old])
    return answer[:place] + new + answer[place + 1 :]


def _with_other_letter(answer: str, word: re.Match[str], rng: random.Random) -> str:
    old = word.group()[0]
    option = len(answer.strip()) == 1 and old.upper() in "ABCDE"
    letters = "ABCDE" if option else string.ascii_uppercase
    new = rng.choice([letter for letter in letters if letter != old.upper()])
    place = word.start()
    return answer[:place] + (new if old.isupper() else new.lower()) + answer[place + 1 :]


def _last_boxed(text: str) -> tuple[int, int] | None:
    r"""Start and end of the content of the last balanced `\\boxed{}`."""
    start = text.rfind(_BOXED)
    while start >= 0:
        depth = 0
        for place in range(start + len(_BOXED) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return start + len(_BOXED), place
        start = text.rfind(_BOXED, 0, start)
    return None


def _last_answer(text: str) -> tuple[int, int]:
    numbers = list(re.finditer(r"[0-9][0-9.,/]*", text))
    found = numbers or list(_WORD.finditer(text))
    return found[-1].span() if found else (len(text), len(text))

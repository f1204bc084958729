"""Calls reward functions, of three kinds found by their parameters, as their authors wrote them.

    TRL         f(completions, **columns) -> [1.0]     lists of one; also prompts, completion_ids
    verifiers   f(completion, answer, state) -> 1.0    any of prompt, info, task and columns, too
    plain       f(answer, output) -> 1.0               the answer's column and the text

Any of them may be `async def`. Whether a completion is a text or a list of messages is what the
annotation of the parameter says; without one, TRL's functions get what TRL would give them (texts
for a prompt that is a text), those of verifiers messages.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError, InputError, ScorerError
from envserver_records.records import Message, text_of

from ..folders import import_path

RewardFunction = Callable[..., Any]
Weighted = tuple["RewardFunction | str", float]

_TRL = {"completions", "prompts", "completion_ids"}
_OF_GROUPS = {"states", "answers", "infos", "tasks"}
_OPEN = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True)
class Scored:
    """A completion to be scored.

    Args:
        prompt: the conversation that was sent.
        prompt_is_text: the row's prompt is a text, not a conversation.
        completion: what the model added to it.
        output: the text of the answer.
        answer: of the row; None: it has none.
        columns: the row's columns by the names that functions see.
        state: what verifiers' functions find in `state`, besides the above.
    """

    prompt: list[Message]
    prompt_is_text: bool
    completion: list[Message]
    output: str
    answer: Any
    columns: Mapping[str, Any]
    state: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] | None = None


class Reward:
    def __init__(self, function: RewardFunction | str, weight: float) -> None:
        self.function = _loaded(function) if isinstance(function, str) else function
        self.weight = weight
        self.name = name_of(function)
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError) as error:
            raise ConfigError(f"The reward function {self.name!r} has no signature.") from error
        self._annotations = {
            name: str(parameter.annotation) for name, parameter in parameters.items()
        }
        kinds = [parameter.kind for parameter in parameters.values()]
        self._takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        named = {
            name: parameter for name, parameter in parameters.items() if parameter.kind not in _OPEN
        }
        self._names = set(named)
        self._needed = {
            name for name, parameter in named.items() if parameter.default is parameter.empty
        }
        self._is_trl = bool(self._names & _TRL)
        # A method of a verifiers rubric is called with the parser of its rubric.
        self._parser = getattr(getattr(self.function, "__self__", None), "parser", None) or _PARSER
        if self._names & _OF_GROUPS:
            raise ConfigError(
                f"The reward function {self.name!r} scores a group at once "
                f"({', '.join(sorted(self._names & _OF_GROUPS))}).",
                hint="Write that in `score_group` of an environment.",
            )

    @property
    def needs_token_ids(self) -> bool:
        return "completion_ids" in self._needed

    def call(self, scored: Scored, log_metric: Callable[[str, float], None]) -> Any:
        """Returns what the function returns; of an `async def`, something to await."""
        offered = self._for_trl(scored, log_metric) if self._is_trl else self._by_name(scored)
        missing = self._needed - offered.keys()
        if missing:
            raise ScorerError(
                f"The reward function {self.name!r} asks for {', '.join(sorted(missing))}; "
                f"there are {', '.join(sorted(offered))}.",
                hint="`columns` gives columns the names that functions ask for.",
            )
        chosen = {
            name: value for name, value in offered.items() if self._takes_all or name in self._names
        }
        return self.function(**chosen)

    def number(self, returned: Any) -> float | None:
        """Returns the reward in what the function returned; None: it does not apply."""
        return self._number(self._only_one(returned) if self._is_trl else returned)

    def _for_trl(self, scored: Scored, log_metric: Callable[[str, float], None]) -> dict[str, Any]:
        as_text = self._wants_text("completions", scored.prompt_is_text)
        prompt = scored.prompt[-1].get("content") if as_text and scored.prompt else scored.prompt
        offered: dict[str, Any] = {name: [value] for name, value in scored.columns.items()}
        if scored.answer is not None:
            offered.setdefault("answer", [scored.answer])
        offered["prompts"] = [prompt]
        offered["completions"] = [scored.output if as_text else scored.completion]
        offered["log_extra"] = _ignored
        offered["log_metric"] = log_metric
        if scored.completion_ids is not None:
            offered["completion_ids"] = [list(scored.completion_ids)]
        return offered

    def _by_name(self, scored: Scored) -> dict[str, Any]:
        as_text = self._wants_text("completion", False)
        completion = scored.output if as_text else scored.completion
        offered: dict[str, Any] = {"info": {}, "task": "", "parser": self._parser}
        offered |= scored.columns
        offered |= {
            "prompt": scored.prompt,
            "completion": completion,
            "answer": "" if scored.answer is None else scored.answer,
            "output": scored.output,
        }
        state = {**offered, **scored.state}
        return {**offered, "state": state}

    def _wants_text(self, parameter: str, otherwise: bool) -> bool:
        annotation = self._annotations.get(parameter, "").lower()
        if "dict" in annotation or "message" in annotation:
            return False
        return True if "str" in annotation else otherwise

    def _only_one(self, value: Any) -> Any:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise self._wrong(value, "a list with one reward")
        listed = list(value)
        if len(listed) != 1:
            raise self._wrong(value, "a list with one reward")
        return listed[0]

    def _number(self, value: Any) -> float | None:
        if value is None:
            return None
        try:
            if isinstance(value, str):
                raise TypeError
            return float(value)
        except (TypeError, ValueError):
            raise self._wrong(value, "a number or None") from None

    def _wrong(self, value: Any, wanted: str) -> ScorerError:
        return ScorerError(
            f"The reward function {self.name!r} returned {str(value)[:80]!r}, not {wanted}."
        )


class _Parser:
    """What verifiers calls the default parser: the answer is the last text."""

    def parse(self, text: str) -> str:
        return text

    def parse_answer(self, completion: list[Message] | str) -> str:
        return completion if isinstance(completion, str) else text_of(completion[-1])


_PARSER = _Parser()


def _ignored(*_: Any) -> None:
    """TRL's `log_extra`: a column of its table of completions."""


def name_of(function: RewardFunction | str) -> str:
    if isinstance(function, str):
        return function.rpartition(":")[2] or function
    name = getattr(function, "__name__", "")
    return str(name or type(function).__name__)


def parsed(reference: str) -> Weighted:
    """Reads `my_rewards.py:exact=0.5`: a function and its weight."""
    name, equals, weight = reference.partition("=")
    try:
        value = float(weight) if equals else 1.0
    except ValueError:
        raise InputError(f"{reference!r}: {weight!r} is not a weight.") from None
    path, colon, function = name.strip().rpartition(":")
    if not colon or not path or not function:
        raise InputError(f"{reference!r} does not look like path/to/file.py:function.")
    if path.endswith(".py"):
        path = str(Path(path).absolute())
    return f"{path}:{function}", value


def _loaded(reference: str) -> RewardFunction:
    """Imports `path/to/file.py:function` or `package.module:function`."""
    path, _, name = reference.rpartition(":")
    if path.endswith(".py"):
        module = import_path(Path(path))[0]
    else:
        try:
            module = importlib.import_module(path)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path} cannot be imported: {reason}") from error
    function: RewardFunction | None = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(
            f"{path} has no function {name!r}.", hint=f"It has {', '.join(known[:12])}."
        )
    if inspect.isclass(function):
        raise ConfigError(f"{reference} is a class.", hint="Name a function, or an object of it.")
    return function

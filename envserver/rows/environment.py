"""The environment of rows: asks each row's prompt once; reward functions score the answer.

`from_rows` and `rows_class` (for `--env rows.jsonl`) read nothing: rows are read by `tasks`, and
functions are imported by the scorer.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import sys
import types
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import structlog
from envserver_records.errors import ConfigError, InputError, NotFoundError
from envserver_records.records import Message, PublicTask, Result, Score, Split, Task
from pydantic import Field, ValidationError, create_model, field_validator

from ..environment import Environment, KnownResult, answer_text
from ..rollout_interface import Rollout
from .columns import Columns, RowCounts, columns_in
from .rewards import Reward, Scored, Weighted, parsed
from .sources import HUB, Rows, Source, is_data, is_glob

BAD_ROWS_SHOWN = 5
_log = structlog.get_logger("envserver.rows")


class RowsEnvironment(Environment):
    # A reward function of others may read the whole completion.
    exact_demonstrations = True
    checks_rows = True

    class Config(Environment.Config):
        """Settings of an environment of rows."""

        prompt: str = "prompt"
        """Column of the prompt (a text or a list of messages), or a text with columns in braces:
        "{question} Answer in one word."."""
        answer: str = ""
        """Column of the right answer; unset: `answer`, where a row has it."""
        demonstration: str = ""
        """Text of a right completion with columns in braces, for the simulated engine and `check`;
        unset: the answer itself."""
        system: str = ""
        """System message before each prompt."""
        columns: dict[str, str] = {}
        """Columns by the parameter names of the reward functions, as JSON:
        '{"solution": "answer"}'; unset: all columns by their own names."""
        reward: list[str] = []
        """Reward functions, each with its weight: my_rewards.py:exact or module:function=0.5."""
        reward_range: list[float] | None = Field(default=None, min_length=2, max_length=2)
        """Lowest and highest reward; unset: by the weights, for functions from 0 to 1."""
        solved_at: float | None = None
        """The least reward of a solved task; unset: the highest."""
        subset: str | None = None
        """Configuration of a data set on the hub."""
        splits: dict[str, str] = {}
        """The data set's split names by envserver's, as JSON: '{"validation": "dev"}'."""
        held_out: float = Field(default=0.0, ge=0, lt=1)
        """Share of the rows that are in the splits validation and test, half in each, instead of
        train, where the data have no splits; 0: every split has all rows."""
        shuffle: bool = True
        """Order the tasks by the seed; false: as in the data."""
        bad_rows: Literal["refuse", "skip"] = "refuse"
        """What to do if rows cannot become tasks: refuse to start, or skip and count them."""

        @field_validator("reward")
        @classmethod
        def _functions(cls, value: list[str]) -> list[str]:
            try:
                return ["=".join(map(str, parsed(entry))) for entry in value]
            except InputError as error:
                raise ValueError(error.message) from None

    source: ClassVar[Source]
    functions: ClassVar[Sequence[Weighted]] = ()

    def __init__(self, config: Environment.Config | None = None) -> None:
        super().__init__(config)
        own = self.config
        self.rows = RowCounts()
        self._weighted = [parsed(entry) for entry in own.reward] or list(self.functions)
        if not self._weighted and type(self).score is RowsEnvironment.score:
            raise ConfigError(
                f"{self.name}: no reward function is given.",
                hint="--env.reward my_rewards.py:exact, or from_rows(..., reward=exact).",
            )
        self._rewards: list[Reward] | None = None
        self._columns = Columns(own.prompt, own.answer, own.demonstration, own.system, own.columns)
        columns_in(own.prompt), columns_in(own.demonstration)
        weights = [weight for _, weight in self._weighted]
        if own.reward_range is not None:
            self.reward_range = (own.reward_range[0], own.reward_range[1])  # type: ignore[misc]
        elif weights:
            low, high = (sum(pick(0.0, weight) for weight in weights) for pick in (min, max))
            self.reward_range = (low, high)  # type: ignore[misc]
        if own.solved_at is not None:
            self.solved_at = own.solved_at  # type: ignore[misc]

    def tasks(self, split: Split) -> Iterator[Task]:
        own = self.config
        source = replace(self.source, subset=own.subset, splits=own.splits)
        rows = source.open(split)
        good = self._good(rows, split, held_out=0.0 if rows.has_splits else own.held_out)
        if own.shuffle:
            random.Random(f"rows-{own.seed}-{split}").shuffle(good)
        for number in good:
            yield self._columns.task(_id(number), rows.read(number))

    def _good(self, rows: Rows, split: str, *, held_out: float) -> list[int]:
        """Returns the numbers of the split's rows that make a task, after a look at all rows."""
        good: list[int] = []
        bad: list[str] = []

        def read() -> Iterator[tuple[str, Task | str]]:
            for number in range(rows.count):
                place = rows.place(number)
                try:
                    row = rows.read(number)
                    if held_out and _split_of(row, held_out) != split:
                        continue
                    task = self._columns.task(_id(number), row)
                except InputError as error:
                    bad.append(f"{place}: {error.message}")
                    yield place, error.message
                else:
                    good.append(number)
                    yield place, task

        used = sum(1 for _ in self.rows.tasks(self.name, read(), most_unusable=rows.count))
        self.rows.of[self.name].used = used
        if bad:
            self._tell(bad, rows.count)
        if not good:
            raise ConfigError(f"{self.name}: there are no rows in the split {split!r}.")
        return good

    def _tell(self, bad: list[str], count: int) -> None:
        first = bad[:BAD_ROWS_SHOWN]
        more = [f"and {len(bad) - len(first)} more"] if len(bad) > len(first) else []
        if self.config.bad_rows == "skip" and len(bad) < count:
            _log.warning("bad_rows_skipped", bad=len(bad), rows=count, first=first)
            return
        raise ConfigError(
            "\n".join([f"{len(bad)} of {count} rows cannot become tasks:", *first, *more]),
            hint="Correct them or name other columns; --env.bad_rows skip leaves them out.",
            bad=len(bad),
            rows=count,
        )

    async def rollout(self, task: PublicTask, run: Rollout) -> str:
        return (await run.chat(task.public["messages"])).content

    def prepare_scoring(self) -> None:
        names: dict[str, int] = {}
        self._rewards = []
        for function, weight in self._weighted:
            reward = Reward(function, weight)
            names[reward.name] = names.get(reward.name, 0) + 1
            if names[reward.name] > 1:
                reward.name += f"_{names[reward.name]}"
            self._rewards.append(reward)
        self.scores_token_ids = any(reward.needs_token_ids for reward in self._rewards)

    def score(self, task: Task, result: Result) -> Score | Awaitable[Score]:
        """Adds up the functions' rewards by their weights. If all are None, the row is not
        scorable."""
        if self._rewards is None:
            self.prepare_scoring()
        rewards = self._rewards or []
        metrics: dict[str, float] = {}
        scored = self._scored(task, result)
        returned = [reward.call(scored, metrics.__setitem__) for reward in rewards]
        if any(map(inspect.isawaitable, returned)):
            return _awaited(rewards, returned, metrics)
        return _sum(rewards, returned, metrics)

    def _scored(self, task: Task, result: Result) -> Scored:
        text = answer_text(result)
        messages = task.public["messages"]
        return Scored(
            prompt=messages,
            prompt_is_text=bool(task.public["columns"]),
            completion=[{"role": "assistant", "content": text}],
            output=text,
            answer=task.hidden.get("answer"),
            columns={**task.public["columns"], **task.hidden["columns"]},
            completion_ids=result.completion_ids,
            state={
                "turn": result.turns,
                "is_truncated": result.truncated,
                "stop_condition": result.limit or result.finish_reason,
                "metrics": result.metrics,
            },
        )

    def demonstration(self, task: Task) -> list[Message] | None:
        text = task.hidden.get("demonstration", task.hidden.get("answer"))
        if text is None:
            return None
        return [{"role": "assistant", "content": text if isinstance(text, str) else str(text)}]

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        for message in self.demonstration(task) or ():
            high = self.reward_range[1]
            least = high if self.solved_at is None else self.solved_at
            yield KnownResult("gold", Result(output=message["content"]), least, high)

    def task_from_row(self, row: dict[str, Any]) -> Task:
        return self._columns.task("row", row)

    def task_from_question(self, asked: Any) -> Task:
        columns = columns_in(self.config.prompt)
        if len(columns) != 1:
            raise InputError(f"The prompt has {len(columns)} columns; one text cannot fill it.")
        row = {columns[0]: asked.question}
        if asked.answer is not None:
            row[self.config.answer or "answer"] = asked.answer
        return self._columns.task("question", row)


def rows_class(reference: str) -> type[Environment]:
    if not reference.startswith(HUB):
        if not (Path(reference).exists() or is_glob(reference)):
            raise NotFoundError(f"There is no data file {reference!r}.")
        reference = str(Path(reference).resolve())
    return _class(Source(reference), (), {}, __name__)


def from_rows(
    rows: str | Path | Sequence[Mapping[str, Any]],
    *,
    reward: Any = None,
    **settings: Any,
) -> type[Environment]:
    """Makes an environment of rows and reward functions.

        Sums = from_rows("sums.jsonl", prompt="question", reward=exact)

    Args:
        rows: a JSONL, JSON, CSV, TSV or Parquet file (looked for beside the calling file, then in
            the working directory), a folder of them by split, a data set on the hub, or a list of
            rows.
        reward: a function, a list of functions, or pairs of functions and weights. TRL's and
            verifiers' run unchanged. A name ("trl.rewards:accuracy_reward",
            "my_rewards.py:exact") is imported by scorers only.
        settings: defaults of its Config: `prompt`, `answer`, `columns`, `splits` and so on.

    Returns:
        A class. Name it at the top level of a file, or subclass it there.

    Raises:
        ConfigError, NotFoundError: there are no such rows, or an argument is wrong.
    """
    module = sys._getframe(1).f_globals.get("__name__", "__main__")
    unknown = settings.keys() - RowsEnvironment.Config.model_fields.keys()
    if unknown:
        raise ConfigError(f"from_rows has no argument {sorted(unknown)[0]!r}.")
    try:
        RowsEnvironment.Config(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"from_rows: {first['loc'][0]}: {first['msg']}.") from None
    source = (
        Source(listed=rows)
        if isinstance(rows, Sequence) and not isinstance(rows, str)
        else (Source(_located(str(rows), module)))
    )
    return _class(source, weighted(reward), settings, module)


def weighted(reward: Any) -> list[Weighted]:
    """Reads `reward=`: a function or its name, a list of them or of pairs with weights, or a dict
    with weights."""
    if reward is None:
        return []
    if isinstance(reward, Mapping):
        listed: list[Any] = list(reward.items())
    elif isinstance(reward, (list, tuple)) and not _is_pair(reward):
        listed = list(reward)
    else:
        listed = [reward]
    return [_weighted(entry) for entry in listed]


def _weighted(given: Any) -> Weighted:
    function, weight = given if _is_pair(given) else (given, 1.0)
    if isinstance(function, str):
        name, own = parsed(function)
        return name, own * float(weight)
    if not callable(function):
        raise ConfigError(
            f"{function!r} is not a reward function.",
            hint="Give a function, its name 'my_rewards.py:exact', or pairs (function, weight).",
        )
    return function, float(weight)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (int, float))


def _located(data: str, module: str) -> str:
    """Returns `data` as any process finds it: an absolute path, beside `module`'s file if it is
    there, or a name on the hub."""
    if data.startswith(HUB):
        return data
    folder = Path(getattr(sys.modules.get(module), "__file__", None) or "x").absolute().parent
    for path in (folder / data, Path(data).absolute()):
        if path.exists() or is_glob(data):
            return str(path.resolve())
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", data) and not is_data(data):
        return f"{HUB}{data}"
    raise NotFoundError(f"There is no data file {data!r}.")


def _class(
    source: Source,
    functions: Sequence[Weighted],
    settings: Mapping[str, Any],
    module: str,
) -> type[Environment]:
    name = _name_of(source)
    body = {
        "__module__": module,
        "__doc__": f"Rows of {Path(source.data).name or 'a list'}.",
        "name": name,
        "source": source,
        "functions": tuple(functions),
        "Config": _with_defaults(RowsEnvironment.Config, settings),
    }
    title = name.title().replace("_", "")
    return types.new_class(title, (RowsEnvironment,), exec_body=lambda space: space.update(body))


def _name_of(source: Source) -> str:
    stem = Path(source.data.removeprefix(HUB)).stem if source.data else "listed"
    return f"{re.sub(r'[^0-9a-z]+', '_', stem.lower()).strip('_')}_rows".lstrip("_")


def _with_defaults(config: type[Any], defaults: Mapping[str, Any]) -> type[Any]:
    """Returns `config` with other defaults; their help texts stay."""
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        field = copy.copy(config.model_fields[name])
        field.default = value
        fields[name] = (field.annotation, field)
    return create_model("Config", __base__=config, **fields) if fields else config


def _split_of(row: Mapping[str, Any], held_out: float) -> str:
    """Returns the split of a row by its content: equal rows are never in two splits."""
    text = msgspec.json.encode(row, enc_hook=str, order="sorted")
    share = int.from_bytes(blake2b(text, digest_size=8).digest(), "big") / 2**64
    if share >= held_out:
        return "train"
    return "validation" if share < held_out / 2 else "test"


def _id(number: int) -> str:
    return f"row-{number}"


async def _awaited(rewards: list[Reward], returned: list[Any], metrics: dict[str, float]) -> Score:
    values = [await value if inspect.isawaitable(value) else value for value in returned]
    return _sum(rewards, values, metrics)


def _sum(rewards: list[Reward], returned: list[Any], metrics: dict[str, float]) -> Score:
    numbers = [reward.number(value) for reward, value in zip(rewards, returned, strict=True)]
    pairs = zip(rewards, numbers, strict=True)
    given = [(reward, number) for reward, number in pairs if number is not None]
    return Score(
        reward=sum(reward.weight * number for reward, number in given) if given else None,
        components={reward.name: number for reward, number in given},
        metrics=metrics,
    )

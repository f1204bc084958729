"""The work of `envserver score`: scores rows of tasks and responses, without a model.

An input row is `{"task": <a row of a data set, or a task id>, "response": "text"}`, or has
`"messages"` instead of the response, perhaps `"finish_reason"`. Each gives one output row, in input
order: `{"line", "reward", "components", "metrics", "error", "rewards"}`. A bad row becomes an
output row with an error (exit status 1); a row whose scorer died is scored once more. Memory is
bounded by the rows in flight. The output file appears complete, under its name, at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

import msgspec
from envserver_records.errors import EnvserverError, InputError, NotFoundError
from envserver_records.files import replacing, storing
from envserver_records.records import Score, Task
from envserver_records.waiting import in_order

from ..environment import Environment
from ..judges.server import JudgeServer
from ..registry import absolute
from ..rollouts.ordered import MOST_TASKS, TaskIndex
from ..rollouts.scorer_process import RowToScore
from ..rollouts.scoring import ScorerPool
from ..sandbox.opening import WatchedSandboxes
from .judging import judge_line, judge_of, scorer_processes
from .mix import RunSpec
from .run_settings import ScoreSettings
from .sandboxes import sandboxes_of


class TaskFinder:
    """Finds tasks of an environment by id; reads them only as far as needed.

    Args:
        environment: its tasks are read from another instance, with the settings `changed`.
    """

    def __init__(self, environment: Environment, **changed: Any) -> None:
        self._environment = environment
        self._changed = changed
        self._lock = asyncio.Lock()
        self._index: TaskIndex | None = None

    async def find(self, task_id: str) -> Task:
        async with self._lock:
            if self._index is None:
                try:
                    self._index = TaskIndex(await asyncio.to_thread(self._another))
                except EnvserverError:
                    raise
                except (Exception, SystemExit) as error:
                    what = f"{type(error).__name__}: {error}"
                    raise InputError(f"The tasks cannot be read: {what}") from error
        split = self._index.environment.config.split
        try:
            (task,) = await self._index.find(split, [task_id])
        except NotFoundError as error:
            first = await self._index.after(split, 0, 1)
            error.hint = f"Ids look like {first[0].id!r}." if first else ""
            raise
        return task

    def find_here(self, task_id: str) -> Task:
        """For a debugger: what the environment raises is raised as it is."""
        environment, seen = self._another(), ""
        split = environment.config.split
        for task in itertools.islice(environment.tasks(split), MOST_TASKS):
            if task.id == task_id:
                return task
            seen = seen or task.id
        raise NotFoundError(
            f"There is no task {task_id[:100]!r} in the split {split}.",
            hint=f"Ids look like {seen!r}." if seen else "",
        )

    def _another(self) -> Environment:
        kind = type(self._environment)
        values = self._environment.config.model_dump(mode="json") | self._changed
        return in_sandboxes_of(self._environment, kind(kind.Config.model_validate(values)))


def in_sandboxes_of(opened: Environment, environment: Environment) -> Environment:
    """Lets `environment` use the sandboxes of `opened`, if it has any."""
    if isinstance(sandboxes := getattr(opened, "sandboxes", None), WatchedSandboxes):
        environment.sandboxes = WatchedSandboxes(sandboxes.address)
    return environment


@dataclass(frozen=True)
class OpenScorers:
    """Scorer processes, and an instance of their environment, with its sandboxes."""

    pool: ScorerPool
    environment: Environment
    judge: JudgeServer | None

    def judge_line(self) -> str | None:
        return judge_line(self.judge) if self.judge is not None else None


@asynccontextmanager
async def open_scorers(
    spec: RunSpec[Any], judge_folder: Path, **options: Any
) -> AsyncIterator[OpenScorers]:
    """`judge_folder`: where the judge keeps its answers, unless its settings say it."""
    settings, environment = spec.settings, spec.make_environment()
    async with (
        sandboxes_of(environment, settings.sandbox) as service,
        judge_of(settings.judge, judge_folder) as judge,
        ScorerPool(
            absolute(spec.reference),
            settings.env.model_dump(mode="json"),
            scorer_processes(settings.processes, settings.judge),
            sandbox_address=service.address if service is not None else None,
            judge=judge,
            **options,
        ) as pool,
    ):
        yield OpenScorers(pool, environment, judge)


MAX_LINE_BYTES = 4 << 20
MAX_ROWS_IN_FLIGHT = 512
MAX_BYTES_IN_FLIGHT = 64 << 20

Progress = Callable[[int, float], None]
"""Called with the number of rows done and the share of the input read, in [0, 1]."""


class Summary(msgspec.Struct, kw_only=True):
    """The counts of the output; `unscorable`: valid rows without a reward; `mean_reward`: None: no
    row has one; `first_error`: its place and text; `judge`: its cost."""

    rows: int = 0
    scored: int = 0
    unscorable: int = 0
    errors: int = 0
    mean_reward: float | None = None
    first_error: str | None = None
    judge: str | None = None
    seconds: float = 0.0


async def run_score(
    spec: RunSpec[ScoreSettings], progress: Progress = lambda rows, share: None
) -> Summary:
    output = spec.settings.out
    started = time.monotonic()
    summary = Summary()
    with _open_input(spec.settings.input) as source, _output(output) as target:
        size = max(1, os.fstat(source.fileno()).st_size)

        def deliver(line: _Line, scored: Score) -> None:
            _count(summary, line.number, scored)
            row = {"line": line.number, **msgspec.structs.asdict(scored)}
            del row["turns"]
            with storing(output):
                target.write(json.dumps(row).encode() + b"\n")
            progress(summary.rows, min(1.0, line.end / size))

        async with open_scorers(spec, output.parent) as opened:
            finder = TaskFinder(opened.environment)

            async def score(line: _Line) -> Score:
                try:
                    return await opened.pool.score_row(await _read(line, finder))
                except EnvserverError as error:
                    return Score(error=f"{error.kind}: {error}")

            scored_rows = in_order(_lines(source), score, MAX_BYTES_IN_FLIGHT, size=_size)
            async with aclosing(scored_rows):
                async for line, scored in scored_rows:
                    deliver(line, scored)
            summary.judge = opened.judge_line()
    summary.seconds = time.monotonic() - started
    return summary


class _Line(msgspec.Struct, frozen=True):
    """A line of the input: its number from 1, its end, its bytes (None: it is too long)."""

    number: int
    end: int
    data: bytes | None


def _size(line: _Line) -> int:
    """At least as many bytes as leave room for MAX_ROWS_IN_FLIGHT."""
    return max(len(line.data or b""), MAX_BYTES_IN_FLIGHT // MAX_ROWS_IN_FLIGHT)


class _Row(msgspec.Struct):
    """A row of the input. `task`: a row of a data set, or the id of a task."""

    task: dict[str, Any] | str
    response: str | None = None
    messages: list[dict[str, Any]] | None = None
    finish_reason: str | None = None


async def _read(line: _Line, finder: TaskFinder) -> RowToScore:
    row = _parsed(line.data)
    messages = row.messages or []
    return RowToScore(
        task=await finder.find(row.task) if isinstance(row.task, str) else row.task,
        response=_last_text(messages) if row.response is None else row.response,
        messages=messages,
        finish_reason=row.finish_reason,
    )


def _lines(source: BinaryIO) -> Iterator[_Line]:
    """Skips blank lines; reads a line that is too long only up to the limit."""
    number = end = 0
    while data := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        end += len(data)
        too_long = len(data) > MAX_LINE_BYTES and not data.endswith(b"\n")
        while too_long and (rest := source.readline(MAX_LINE_BYTES)):
            end += len(rest)
            if rest.endswith(b"\n"):
                break
        if too_long:
            yield _Line(number, end, None)
        elif data.strip():
            yield _Line(number, end, data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data)


_FORM: Final = (
    "A row is an object: `task` is a row of a data set (an object) or a task's id (a text), "
    "`response` is a text, or `messages` a list of objects."
)


def _parsed(data: bytes | None) -> _Row:
    if data is None:
        raise InputError(f"The row is longer than {MAX_LINE_BYTES} bytes.")
    try:
        values = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
        if isinstance(values, dict) and not values.get("messages"):
            values.pop("messages", None)
        return msgspec.convert(values, _Row)
    except UnicodeDecodeError as error:
        raise InputError(f"The row is not UTF-8: {error.reason} at byte {error.start}.") from error
    except json.JSONDecodeError as error:
        raise InputError(f"The row is not JSON: {error.msg} at character {error.pos}.") from error
    except msgspec.ValidationError as error:
        raise InputError(f"The row cannot be scored: {error}.", hint=_FORM) from error
    except ValueError as error:
        raise InputError(f"The row is not JSON: {error}") from error
    except RecursionError as error:
        raise InputError("The row is nested too deeply.") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _last_text(messages: list[dict[str, Any]]) -> str:
    if not messages:
        raise InputError("The row has neither a key 'response' nor 'messages'.")
    for message in reversed(messages):
        if message.get("role") == "assistant":
            return _text_of(message.get("content"))
    raise InputError("'messages' holds no message of the assistant.")


def _text_of(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _count(summary: Summary, line_number: int, scored: Score) -> None:
    summary.rows += 1
    if scored.error is not None:
        summary.errors += 1
        summary.first_error = summary.first_error or f"line {line_number}: {scored.error}"
    elif scored.reward is None:
        summary.unscorable += 1
    else:
        total = (summary.mean_reward or 0.0) * summary.scored + scored.reward
        summary.scored += 1
        summary.mean_reward = total / summary.scored


def _open_input(path: Path) -> BinaryIO:
    if not path.is_file():
        raise NotFoundError(f"There is no input file {str(path)!r}.")
    return path.open("rb")


def _output(path: Path) -> AbstractContextManager[BinaryIO]:
    if path.exists() and not path.is_file():
        return _storing_in(path, _device(path))
    # Follow a symbolic link, so that it is not replaced by the file.
    place = Path(os.path.realpath(path))
    return _storing_in(place, replacing(place))


@contextmanager
def _storing_in(path: Path, opened: AbstractContextManager[BinaryIO]) -> Iterator[BinaryIO]:
    """Turns errors on opening and closing into StoreError; errors of the block stay as they are."""
    with ExitStack() as stack:
        with storing(path):
            file = stack.enter_context(opened)
        yield file
        with storing(path):
            stack.close()


@contextmanager
def _device(path: Path) -> Iterator[BinaryIO]:
    file = path.open("wb")
    try:
        yield file
        file.close()
    finally:
        # After an error closing may fail again: a full disk is still full.
        with suppress(OSError):
            file.close()

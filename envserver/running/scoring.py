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
from typing import Any, BinaryIO, NoReturn

import msgspec
from envserver_records.errors import EnvserverError, InputError, NotFoundError
from envserver_records.files import replacing, storing
from envserver_records.records import Score, Task
from envserver_records.waiting import in_order

from ..environment import Environment
from ..judges.server import JudgeServer
from ..registry import absolute, find
from ..rollouts.scorer_process import RowToScore
from ..rollouts.scoring import ScorerPool
from ..sandbox.maker import SandboxAddress
from ..sandbox.opening import WatchedSandboxes
from ..settings.config import SandboxConfig
from ..settings.runs import JudgeConfig
from .judging import judge_line, judge_of, scorer_processes
from .sandboxes import sandboxes_of

MAX_TASKS_SEARCHED = 100_000


class TaskFinder:
    """Finds tasks by id; reads the environment's tasks only as far as needed."""

    def __init__(
        self, env_reference: str, env_config: dict[str, Any], sandbox_address: SandboxAddress | None
    ) -> None:
        self._reference = env_reference
        self._config = env_config
        self._sandbox_address = sandbox_address
        self._lock = asyncio.Lock()
        self._seen: dict[str, Task] = {}
        self._tasks: Iterator[Task] | None = None
        self._split = ""

    @classmethod
    def of(cls, environment: Environment, reference: str, **changed: Any) -> TaskFinder:
        """Finds the tasks of `environment`, with changed settings, in its sandboxes."""
        address = getattr(getattr(environment, "sandboxes", None), "address", None)
        return cls(reference, environment.config.model_dump(mode="json") | changed, address)

    async def find(self, task_id: str) -> Task:
        async with self._lock:
            if task_id not in self._seen:
                await self._search(task_id)
        if task_id not in self._seen:
            raise self._missing(task_id)
        return self._seen[task_id]

    async def _search(self, task_id: str) -> None:
        try:
            await asyncio.to_thread(self._read_until, task_id)
        except EnvserverError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(
                f"The tasks cannot be read: {type(error).__name__}: {error}"
            ) from error

    def find_here(self, task_id: str) -> Task:
        """For a debugger: what the environment raises is raised as it is."""
        self._read_until(task_id)
        if task_id not in self._seen:
            raise self._missing(task_id)
        return self._seen[task_id]

    def _missing(self, task_id: str) -> NotFoundError:
        return NotFoundError(
            f"There is no task {task_id[:100]!r} in the split {self._split}.",
            hint=f"{len(self._seen)} tasks were searched, such as {next(iter(self._seen), '')!r}.",
        )

    def _read_until(self, task_id: str) -> None:
        if self._tasks is None:
            self._tasks = self._all_tasks()
        for task in itertools.islice(self._tasks, MAX_TASKS_SEARCHED - len(self._seen)):
            self._seen.setdefault(task.id, task)
            if task.id == task_id:
                return

    def _all_tasks(self) -> Iterator[Task]:
        environment = environment_of(self._reference, self._config)
        if self._sandbox_address is not None:
            environment.sandboxes = WatchedSandboxes(self._sandbox_address)
        self._split = environment.config.split
        return iter(environment.tasks(environment.config.split))


def environment_of(reference: str, config: dict[str, Any]) -> Environment:
    environment_class = find(reference)
    return environment_class(environment_class.Config.model_validate(config))


@dataclass(frozen=True)
class OpenScorers:
    pool: ScorerPool
    address: SandboxAddress | None
    judge: JudgeServer | None

    def judge_line(self) -> str | None:
        return judge_line(self.judge) if self.judge is not None else None


@asynccontextmanager
async def open_scorers(
    reference: str,
    environment: Environment,
    env_config: dict[str, Any],
    processes: int,
    sandbox: SandboxConfig | None,
    judge: JudgeConfig | None,
    judge_folder: Path,
    **options: Any,
) -> AsyncIterator[OpenScorers]:
    """`judge_folder`: where the judge keeps its answers, unless its settings say it."""
    judge = judge or JudgeConfig()
    async with (
        sandboxes_of(environment, sandbox or SandboxConfig()) as service,
        judge_of(judge, judge_folder) as opened_judge,
    ):
        address = service.address if service is not None else None
        async with ScorerPool(
            reference,
            env_config,
            scorer_processes(processes, judge),
            sandbox_address=address,
            judge=opened_judge,
            **options,
        ) as pool:
            yield OpenScorers(pool, address, opened_judge)


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
    env_reference: str,
    env_config: dict[str, Any],
    input: Path,
    output: Path,
    *,
    processes: int = 2,
    sandbox: SandboxConfig | None = None,
    judge: JudgeConfig | None = None,
    progress: Progress = lambda rows, share: None,
) -> Summary:
    reference = absolute(env_reference)
    started = time.monotonic()
    summary = Summary()
    with _open_input(input) as source, _output(output) as target:
        size = max(1, os.fstat(source.fileno()).st_size)

        def deliver(line: _Line, scored: Score) -> None:
            _count(summary, line.number, scored)
            row = {"line": line.number, **msgspec.structs.asdict(scored)}
            del row["turns"]
            with storing(output):
                target.write(json.dumps(row).encode() + b"\n")
            progress(summary.rows, min(1.0, line.end / size))

        environment = environment_of(reference, env_config)
        async with open_scorers(
            reference, environment, env_config, processes, sandbox, judge, output.parent
        ) as opened:
            finder = TaskFinder(reference, env_config, opened.address)

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


async def _read(line: _Line, finder: TaskFinder) -> RowToScore:
    row = _parsed(line.data)
    if "task" not in row:
        raise InputError("The row has no key 'task'.")
    task = row["task"]
    if isinstance(task, str):
        task = await finder.find(task)
    elif not isinstance(task, dict):
        raise InputError("'task' must be a data-set row (an object) or a task id (a text).")
    finish_reason = row.get("finish_reason")
    if finish_reason is not None and not isinstance(finish_reason, str):
        raise InputError("'finish_reason' must be a text.")
    messages = _messages(row)
    return RowToScore(
        task=task,
        response=_response(row, messages),
        messages=messages,
        finish_reason=finish_reason,
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


def _parsed(data: bytes | None) -> dict[str, Any]:
    if data is None:
        raise InputError(f"The row is longer than {MAX_LINE_BYTES} bytes.")
    try:
        row = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InputError(f"The row is not UTF-8: {error.reason} at byte {error.start}.") from error
    except json.JSONDecodeError as error:
        raise InputError(f"The row is not JSON: {error.msg} at character {error.pos}.") from error
    except ValueError as error:
        raise InputError(f"The row is not JSON: {error}") from error
    except RecursionError as error:
        raise InputError("The row is nested too deeply.") from error
    if not isinstance(row, dict):
        raise InputError("The row is not a JSON object.")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("messages") or []
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InputError("'messages' must be a list of objects.")
    return messages


def _response(row: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    response = row.get("response")
    if response is not None:
        if not isinstance(response, str):
            raise InputError("'response' must be a text.")
        return response
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

"""Reads trajectories from files, checks them, and converts them to unified trajectories.

A document is a `.json` file, a line of `.jsonl` or a sample of a log of Inspect; an unreadable one
comes with the reason. Files that describe a folder (MANIFEST.json, SUMMARY.json) are skipped.

Documents are a unified trajectory; a trace of the text protocol; a group of `envserver process`; a
sample of Inspect's logs; or a foreign trajectory. Every written trajectory is valid, task ids are
unique, and each skipped document is reported. Known keys of a foreign trajectory:

    question      task, question, problem, prompt, query, instruction, title; at the top or deeper
    final_answer  final_answer, final, answer, solution, result, completion; else the assistant's
                  last message
    actions       actions, steps, tool_calls, calls, trajectory; else the calls in its messages
    an action's   tool: tool, name, type; input: input, args, request, arguments; output: output,
                  response, observation, result
    metadata      start_ts, end_ts, model, seed, reward, under their usual names

Everything else is kept: of an action beside its own keys, of the document in `metadata.raw`. An
action without tool, input and output is refused: nothing is invented. The keys that ojo1996's
VideoMultiAgents_HOEY reads (convert_to_out_traj_format.py) are among these, with the same meaning.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from envserver_records.errors import ConfigError, EnvserverError, InputError, NotFoundError
from envserver_records.files import replacing, storing
from envserver_records.records import Json, text_of

from envserver.export.stored import group_of
from envserver.export.stored_sources import opened
from envserver.export.unified import (
    DOMAINS,
    SCHEMA_VERSION,
    actions_of,
    json_text,
    problems_of,
    problems_of_trace,
    unified_of_trace,
    write_json,
)

from .exporting.formats import Options, Unified
from .exporting.inspect import LOST, REWARD, STORE, message_of, require_inspect
from .sft_building import as_line


@dataclass(frozen=True)
class Document:
    """A document, or why it cannot be read."""

    path: Path
    line: int | None
    value: Any
    problem: str | None
    bytes: int
    part: str = ""

    @property
    def place(self) -> str:
        """`file.json`, or `file.jsonl, line 7`."""
        part = self.part if self.line is None else f"line {self.line}"
        return f"{self.path}, {part}" if part else str(self.path)


_VALUES = {
    "C": 1.0,
    "P": 0.5,
    "I": 0.0,
    "N": 0.0,
    "yes": 1.0,
    "true": 1.0,
    "no": 0.0,
    "false": 0.0,
}
"""Inspect's own values of scores that are text."""


def is_inspect_log(value: Any) -> bool:
    spec = value.get("eval") if isinstance(value, dict) else None
    return isinstance(spec, dict) and "task" in spec and "status" in value


def inspect_documents(path: Path) -> Iterator[Document]:
    require_inspect()
    size = path.stat().st_size
    samples = _samples(path)
    number = 0
    while True:
        try:
            name, sample = next(samples)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - inspect_ai raises what ZIP, JSON, pydantic raise
            yield Document(path, None, None, f"not a log of Inspect: {_why(error)}", size)
            return
        number += 1
        value, problem = _read(sample)
        if value is not None or problem is not None:
            yield Document(path, None, value, problem, size if number == 1 else 0, part=name)


def _samples(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields each sample with its name; for one that cannot be read the error."""
    from inspect_ai import log
    from inspect_ai._util.async_zip import AsyncZipReader
    from inspect_ai._util.asyncfiles import AsyncFilesystem

    if path.suffix != ".eval":
        whole = log.read_eval_log(path, format="json", resolve_attachments=True)
        for sample in whole.samples or ():
            yield f"sample {sample.id}, epoch {sample.epoch}", sample
        return
    summaries = log.read_eval_log_sample_summaries(path, format="eval")
    with asyncio.Runner() as runner:
        # One reader for all samples: each new one would read the file's directory again.
        reader = AsyncZipReader(AsyncFilesystem(), str(path))
        for summary in summaries:
            reading = log.read_eval_log_sample_async(
                str(path), summary.id, summary.epoch, resolve_attachments=True, reader=reader
            )
            try:
                read: Any = runner.run(reading)
            except Exception as error:  # noqa: BLE001 - as above
                read = error
            yield f"sample {summary.id}, epoch {summary.epoch}", read


def _read(sample: Any) -> tuple[Any, str | None]:
    """Returns a sample's document, or why there is none; neither for a lost rollout."""
    if isinstance(sample, Exception):
        return None, f"cannot be read: {_why(sample)}"
    ours = sample.store.get(STORE)
    try:
        if ours is not None:
            return _line(ours, [message_of(message) for message in sample.messages]), None
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        return None, f"its store is not that of a rollout: {_why(error)}"
    if sample.error is not None:
        lost = LOST in sample.metadata
        return None, None if lost else f"ended with an error: {sample.error.message[:200]}"
    return _foreign(sample), None


def _line(ours: Json, messages: list[Json]) -> Json:
    (rollout,) = ours["envserver"]["rollouts"]
    rollout = {**rollout, "messages": messages}
    return {**ours, "envserver": {**ours["envserver"], "rollouts": [rollout]}}


def _foreign(sample: Any) -> Json:
    question = sample.input if isinstance(sample.input, str) else None
    name = str(sample.id) if sample.epoch == 1 else f"{sample.id}-epoch-{sample.epoch}"
    document = {
        "task_id": name,
        "question": question,
        "messages": [message_of(message) for message in sample.messages],
        "final_answer": sample.output.completion,
        "model": sample.output.model,
        "score": _score(sample),
        "start_ts": _seconds(sample.started_at),
        "end_ts": _seconds(sample.completed_at),
        "target": sample.target,
        "sample": sample.metadata,
        "limit": sample.limit.type if sample.limit else None,
    }
    return {key: value for key, value in document.items() if value not in (None, "", [], {})}


def _score(sample: Any) -> Json:
    numbers: dict[str, float] = {}
    for scorer, score in (sample.scores or {}).items():
        value = score.value
        parts = value if isinstance(value, dict) else {"": value}
        for name, part in parts.items():
            if (number := _number(part)) is not None:
                numbers[f"{scorer}/{name}" if name else scorer] = number
    total = numbers.get(REWARD)
    if total is None and len(numbers) == 1:
        (total,) = numbers.values()
    return numbers if total is None else {**numbers, "total": total}


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _VALUES.get(value, _VALUES.get(value.lower()))
    if isinstance(value, (bool, int, float)) and math.isfinite(value):
        return float(value)
    return None


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst")
INSPECT = ".eval"
MAX_BYTES = 256 << 20
"""Maximum size of one document."""
_ABOUT_A_FOLDER = ("MANIFEST.json", "SUMMARY.json", "summary.json")


def files_of(sources: Sequence[str]) -> list[Path]:
    """Returns the files that `sources` name, each once, sorted by path."""
    found: dict[str, Path] = {}
    for source in sources:
        files = list(_files(source))
        if not files:
            raise NotFoundError(
                f"{source!r} names no .json, .jsonl or .eval file.",
                hint="Give files, folders, or globs in quotes.",
            )
        found |= {str(path): path for path in files}
    return [found[name] for name in sorted(found)]


def documents(files: Iterable[Path]) -> Iterator[Document]:
    """Yields the documents in `files`, one at a time."""
    for path in files:
        if path.name.endswith(LINES):
            yield from _lines(path)
        elif path.suffix == INSPECT:
            yield from inspect_documents(path)
        else:
            document = _whole(path)
            is_log = is_inspect_log(document.value)
            yield from inspect_documents(path) if is_log else [document]


def objects(sources: Sequence[str]) -> Iterator[Document]:
    """Yields the documents of `sources`, all of which must be JSON objects."""
    for document in documents(files_of(sources)):
        problem = document.problem
        if problem is None and not isinstance(document.value, dict):
            problem = "not a JSON object"
        if problem is not None:
            raise InputError(f"{document.place}: {problem}.", place=document.place)
        yield document


def _files(source: str) -> Iterator[Path]:
    path = Path(source)
    if path.is_dir():
        yield from (
            file
            for file in path.rglob("*")
            if _is_document(file.relative_to(path)) and file.is_file()
        )
    elif path.is_file():
        yield path
    elif any(letter in source for letter in "*?["):
        for name in glob.glob(source, recursive=True):  # noqa: PTH207 - absolute globs, too
            yield from _files(name) if Path(name).is_dir() else [Path(name)]


def _is_document(path: Path) -> bool:
    if any(part.startswith(".") for part in path.parts) or path.name in _ABOUT_A_FOLDER:
        return False
    return path.name.endswith((".json", INSPECT, *LINES)) and ".failures.jsonl" not in path.name


def _whole(path: Path) -> Document:
    try:
        data = path.read_bytes()
    except OSError as error:
        return Document(path, None, None, f"cannot be read: {error.strerror}", 0)
    return _parsed(path, None, data)


def _lines(path: Path) -> Iterator[Document]:
    number = 0
    try:
        with opened(path) as file:
            while data := file.readline(MAX_BYTES):
                number += 1
                if data.strip():
                    yield _parsed(path, number, data)
    except (EnvserverError, OSError) as error:
        yield Document(path, number + 1, None, f"cannot be read: {error}", 0)


def _parsed(path: Path, line: int | None, data: bytes) -> Document:
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        problem = f"not JSON: {error}"
    except RecursionError:
        problem = "not JSON: nested too deeply"
    else:
        return Document(path, line, value, None, len(data))
    return Document(path, line, None, problem, len(data))


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


OnProgress = Callable[[int, int], None]
"""Called with the numbers of documents and bytes read so far."""
Bad = Callable[[str, str], None]
"""Called with the place of a document (`file.json`; `file.jsonl, line 7`) and a problem."""


@dataclass
class Validation:
    files: int = 0
    bad_files: int = 0
    documents: int = 0
    bad: int = 0


def validate(
    sources: Sequence[str],
    *,
    bad: Bad = lambda place, reason: None,
    on_progress: OnProgress = lambda count, size: None,
    domains: Collection[str] = DOMAINS,
) -> Validation:
    """Checks every trajectory of `sources`."""
    report = Validation()
    seen: dict[Path, set[bytes]] = {}
    wrong: set[Path] = set()
    size = 0
    files = files_of(sources)
    for document in documents(files):
        report.documents += 1
        size += document.bytes
        problems = _problems(document, seen, domains)
        report.bad += bool(problems)
        if problems:
            wrong.add(document.path)
        for problem in problems:
            bad(document.place, problem)
        on_progress(report.documents, size)
    report.files, report.bad_files = len(files), len(wrong)
    return report


def _problems(
    document: Document, seen: dict[Path, set[bytes]], domains: Collection[str]
) -> list[str]:
    if document.problem is not None:
        return [document.problem]
    try:
        problems = problems_of(document.value, domains=domains)
    except RecursionError:
        return ["nested too deeply"]
    task_id = document.value.get("task_id") if isinstance(document.value, dict) else None
    if isinstance(task_id, str):
        among = document.path.parent if document.line is None else document.path
        digest = hashlib.blake2b(task_id.encode(errors="replace"), digest_size=12).digest()
        ids = seen.setdefault(among, set())
        if digest in ids:
            problems.append(f"$.task_id: {task_id[:80]!r} appears twice")
        ids.add(digest)
    return problems


QUESTION = ("task", "question", "problem", "prompt", "query", "instruction", "title")
FINAL = ("final_answer", "final", "answer", "solution", "result", "completion")
ACTIONS = ("actions", "steps", "tool_calls", "calls", "trajectory")
TOOL = ("tool", "name", "type", "tool_name")
INPUT = ("input", "args", "request", "arguments")
OUTPUT = ("output", "response", "observation", "result")

_STARTED = ("start_ts", "start_time", "started_at", "timestamp", "created_at")
_ENDED = ("end_ts", "end_time", "ended_at", "finished_at")
_MODEL = ("model", "model_name")
_REWARD = ("reward", "score")
_SAYS_NO_ANSWER = (*ACTIONS, *_REWARD, "messages", "metrics", "components")
_OWN = ("schema_version", "task_id", "domain", "messages", "seed")
_ASSISTANTS = ("assistant", "final")
_UNKNOWN = "unknown"


def unified_of_foreign(value: Any, *, task_id: str, domain: str) -> Json:
    document = _document(value)
    messages = _messages(document)
    key = _key_of_actions(document)
    actions = _actions(document[key], key) if key else _actions_in(messages)
    answer = _final(document, messages)
    question = _question(document)
    if not actions and not answer and question is None:
        raise ValueError("it has no steps, no messages, no question and no answer")
    return {
        "schema_version": SCHEMA_VERSION,
        "task_id": task_id,
        "domain": domain,
        "question": question,
        "actions": actions,
        "final_answer": answer,
        "metadata": _metadata(document, messages, actions, key),
    }


def _document(value: Any) -> Json:
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {"messages": value} if all("role" in item for item in value) else {"steps": value}
    raise ValueError("it is neither an object nor a list of objects")


def _messages(document: Json) -> list[Json]:
    found = document.get("messages")
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _key_of_actions(document: Json) -> str | None:
    for key in ACTIONS:
        found = document.get(key)
        if isinstance(found, list) and found and all(isinstance(item, dict) for item in found):
            return key
    return None


def _actions(steps: list[Json], key: str) -> list[Json]:
    numbers = [step.get("step") for step in steps]
    if all(type(number) is int for number in numbers):
        steps = sorted(steps, key=lambda step: int(step["step"]))
    return [_action(number, step, f"{key}[{number - 1}]") for number, step in enumerate(steps, 1)]


def _action(number: int, step: Json, place: str) -> Json:
    call = step.get("function")
    said = {**step, **call} if isinstance(call, dict) else step
    tool = next((name for key in TOOL if (name := said.get(key)) and isinstance(name, str)), None)
    given, got = _first(said, INPUT), _first(said, OUTPUT)
    if tool is None and given == "" and isinstance(said.get("action"), str):  # SWE-agent
        tool, given = "bash", {"command": said["action"]}
    if tool in (None, _UNKNOWN) and not given and not got:
        keys = ", ".join(map(str, step)) or "none"
        raise ValueError(f"{place} has no tool, no input and no output (its keys: {keys})")
    rest = {k: v for k, v in said.items() if k not in (*TOOL, *INPUT, *OUTPUT, "step", "function")}
    if "ts" in rest and _seconds(rest["ts"]) is None:
        del rest["ts"]
    return {"step": number, "tool": tool or _UNKNOWN, "input": given, "output": got, **rest}


def _first(step: Json, keys: tuple[str, ...]) -> Any:
    return next((step[key] for key in keys if step.get(key) not in (None, "")), "")


def _actions_in(messages: list[Json]) -> list[Json]:
    if any(message.get("tool_calls") for message in messages):
        return actions_of(messages)
    found = [_of_message(message) for message in messages]
    runs = [run for run in found if run is not None]
    return [{"step": n, **run} for n, run in enumerate(runs, 1)] or actions_of(messages)


def _of_message(message: Json) -> Json | None:
    tool = message.get("tool")
    if not isinstance(tool, str) or not tool:
        tool = "bash" if "cmd" in message else "tool" if message.get("role") == "tool" else None
    if tool is None:
        return None
    given = _first(message, ("cmd", "input", "content"))
    return {"tool": tool, "input": given, "output": _first(message, ("output",))}


def _question(document: Json) -> str | None:
    found = _searched(document, QUESTION, without=())
    return found if found is None else json_text(found)


def _final(document: Json, messages: list[Json]) -> str:
    found = _searched(document, FINAL, without=_SAYS_NO_ANSWER)
    if isinstance(found, dict):
        inner = _searched(found, FINAL, without=_SAYS_NO_ANSWER)
        found = found if inner is None else inner
    if found is not None:
        return json_text(found)
    said = (
        text_of(message).strip()
        for message in reversed(messages)
        if message.get("role") in _ASSISTANTS
    )
    return next((text for text in said if text), "")


def _searched(value: Any, keys: Collection[str], *, without: Collection[str]) -> Any:
    """Returns the value of the first of `keys` found: top level before deeper levels, in order."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in keys and inner not in (None, "", [], {}):
                return inner
        values = [inner for key, inner in value.items() if key not in without]
    else:
        values = value if isinstance(value, list) else []
    for inner in values:
        found = _searched(inner, keys, without=without)
        if found is not None:
            return found
    return None


def _metadata(document: Json, messages: list[Json], actions: list[Json], key: str | None) -> Json:
    own = document.get("metadata")
    own = own if isinstance(own, dict) else {}
    facts = {**document, **own}
    times = [ts for action in actions if (ts := _seconds(action.get("ts"))) is not None]
    known = [*times, *itertools.islice(_times(facts, _ENDED), 1)]
    started = next(_times(facts, _STARTED), min(known, default=0.0))
    found: Json = {"start_ts": min([started, *times]), "end_ts": max([started, *known])}
    found["source"] = source if isinstance(source := own.get("source"), str) else "converted"
    found |= _model(facts) | _seed(facts) | _reward(facts)
    if messages:
        found["sequences"] = [{"agent": None, "messages": messages}]
    used = {*_OWN, *QUESTION, *FINAL, *_STARTED, *_ENDED, key}
    said = {"question": _question(document), "final_answer": _final(document, messages)}
    rest = {
        name: value
        for name, value in document.items()
        if value not in (None, "", [], {}) and (name not in used or _is_left(name, value, said))
    }
    return found | ({"raw": rest} if rest else {})


def _is_left(name: str, value: Any, said: Json) -> bool:
    return name in (*QUESTION, *FINAL) and json_text(value) not in said.values()


def _times(facts: Json, names: tuple[str, ...]) -> Iterator[float]:
    return (ts for name in names if (ts := _seconds(facts.get(name))) is not None)


def _seconds(value: Any) -> float | None:
    """Returns a number or a date as Unix seconds; a date without a zone is read as UTC."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _model(facts: Json) -> Json:
    for name in _MODEL:
        value = facts.get(name)
        value = value.get("name") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            return {"model": value}
    return {}


def _seed(facts: Json) -> Json:
    seed = facts.get("seed")
    return {"seed": seed} if type(seed) is int else {}


def _reward(facts: Json) -> Json:
    """Returns the reward; for one with parts the total and the parts."""
    for name in _REWARD:
        value = facts.get(name)
        if isinstance(value, dict):
            parts = {k: v for k, v in value.items() if type(v) in (int, float)}
            total = parts.pop("total", None)
            return {"reward": total, "components": parts}
        if type(value) in (int, float):
            return {"reward": value}
    return {}


Failed = Callable[[str, str], None]
"""Called with the place of a skipped document and the reason."""


@dataclass
class Conversion:
    read: int = 0
    failed: int = 0
    written: dict[str, int] = field(default_factory=dict)


def convert(
    sources: Sequence[str],
    out: Path,
    *,
    domain: str | None = None,
    tokens: bool = False,
    failed: Failed = lambda place, reason: None,
    on_progress: OnProgress = lambda count, size: None,
) -> Conversion:
    """Writes the trajectories of `sources` below `out`; files of the same name are replaced.

    Args:
        sources: files, folders and globs.
        out: a folder, or a .jsonl file, which is written atomically. A folder that is called as
            `domain` takes the files itself: no second folder of this name is made in it.
        domain: domain of foreign trajectories; unset: as they state, else their folder's name.
        tokens: include the training rows of groups, and of logs of Inspect that have them.
        failed: called for each skipped document; the others are still written.
    """
    if domain is not None and domain not in DOMAINS:
        raise ConfigError(f"There is no domain {domain!r}.", hint=f"One of {', '.join(DOMAINS)}.")
    report = Conversion()
    converter = Converter(domain, tokens=tokens)
    size = 0
    with _sink(out, domain) as write:
        for document in documents(files_of(sources)):
            report.read += 1
            size += document.bytes
            try:
                for trajectory in converter.trajectories(document):
                    write(trajectory)
                    name = trajectory["domain"]
                    report.written[name] = report.written.get(name, 0) + 1
            except (InputError, ValueError, RecursionError) as error:
                report.failed += 1
                failed(document.place, _reason(error))
            on_progress(report.read, size)
    return report


class Converter:
    def __init__(self, domain: str | None = None, *, tokens: bool = False) -> None:
        self._domain = domain
        self._groups = Unified(Options(jsonl=True, tokens=tokens))
        self._seen: dict[bytes, str] = {}

    def trajectories(self, document: Document) -> list[Json]:
        """Returns the trajectories in `document`, all valid, with ids not used before."""
        if document.problem is not None:
            raise ValueError(document.problem)
        value, place = document.value, document.place
        if isinstance(value, dict) and "tokens" in value and "scores" in value:
            group = group_of(value, place)
            made = [row for row in self._groups.rows(group, group.rollouts) if type(row) is dict]
        else:
            made = [self._single(document)]
            if problems := problems_of(made[0]):
                raise ValueError("; ".join(problems[:3]))
        digests = [_digest(row["task_id"]) for row in made]
        for digest, trajectory in zip(digests, made, strict=True):
            if digest in self._seen:
                where = self._seen[digest]
                raise ValueError(f"its task id {trajectory['task_id']!r} is that of {where}, too")
        self._seen |= dict.fromkeys(digests, place)
        return made

    def _single(self, document: Document) -> Json:
        value = document.value
        if isinstance(value, dict) and value.get("schema_version") == SCHEMA_VERSION:
            return value
        if _is_trace(value):
            if problems := problems_of_trace(value):
                raise ValueError(f"a trace, but {'; '.join(problems[:3])}")
            return unified_of_trace(value, domain=self._domain or "swe")
        found = self._domain or _own_domain(value) or _folder_domain(document.path)
        if found is None:
            raise ValueError(f"its domain is not known (--domain, one of {', '.join(DOMAINS)})")
        own = _own_id(value) or _name(document)
        task_id = own if own.startswith(f"{found}-") else f"{found}-{own}"
        return unified_of_foreign(value, task_id=task_id, domain=found)


def file_name(task_id: str) -> str:
    """Returns the file name of a task: its id, or as much of it as a file name allows."""
    plain = "".join(
        letter if letter.isalnum() or letter in "-_.,+=@ :" else "_" for letter in task_id
    )
    if plain == task_id and len(task_id.encode()) <= 200 and not task_id.startswith("."):
        return f"{task_id}.json"
    short = plain.encode()[:150].decode(errors="ignore").lstrip(".")
    return f"{short}-{hashlib.sha256(task_id.encode()).hexdigest()[:12]}.json"


def _digest(task_id: str) -> bytes:
    return hashlib.blake2b(task_id.encode(), digest_size=12).digest()


def _name(document: Document) -> str:
    if document.line is None:
        return document.path.stem
    return f"{document.path.name.partition('.jsonl')[0]}-{document.line:06d}"


def _reason(error: Exception) -> str:
    said = error.message if isinstance(error, InputError) else str(error)
    return "nested too deeply" if isinstance(error, RecursionError) else said.rstrip(".")


def _is_trace(value: Any) -> bool:
    if not isinstance(value, dict) or "run_id" not in value:
        return False
    steps = value.get("steps")
    return isinstance(steps, list) and all(isinstance(s, dict) and "i" in s for s in steps)


def _own_domain(value: Any) -> str | None:
    found = value.get("domain") if isinstance(value, dict) else None
    return found if found in DOMAINS else None


def _folder_domain(path: Path) -> str | None:
    return next((part for part in reversed(path.parent.parts) if part in DOMAINS), None)


def _own_id(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    for key in ("task_id", "instance_id", "id"):
        found = value.get(key)
        if isinstance(found, (str, int)) and not isinstance(found, bool) and str(found).strip():
            return str(found)
    return None


@contextmanager
def _sink(out: Path, domain: str | None) -> Iterator[Callable[[Json], object]]:
    """Yields what writes a trajectory: as a file below `out`, or as a line of the file `out`, which
    gets its name when all lines are on disk."""
    if out.suffix != ".jsonl":
        yield partial(_write, out.parent if domain is not None and out.name == domain else out)
        return
    with storing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        opened = ExitStack()
        file = opened.enter_context(replacing(out))
    try:
        yield lambda trajectory: _stored(file, out, trajectory)
    except BaseException:  # also an OSError of another file or of the terminal
        with opened:
            raise
    with storing(out):
        opened.close()


def _stored(file: BinaryIO, out: Path, trajectory: Json) -> None:
    line = as_line(trajectory)
    with storing(out):
        file.write(line)


def _write(folder: Path, trajectory: Json) -> None:
    try:
        write_json(folder / trajectory["domain"] / file_name(trajectory["task_id"]), trajectory)
    except TypeError as error:  # a number beyond 64 bits, half of a pair of surrogates
        raise ValueError(f"not to be written as JSON: {error}") from error

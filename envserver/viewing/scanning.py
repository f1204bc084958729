"""Finds the groups in files, in one pass that can go on when a file has grown.

A last line without an end is left for the next pass unless it is whole; documents of one task that
follow each other are one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
import orjson
from envserver_records.errors import InputError
from envserver_records.records import Group
from envserver_records.tasks import range_from_json

from ..export.stored import group_of, group_record, names_of_foreign
from ..export.stored_sources import decoded, is_json, opened
from ..export.unified import FINALIZE, json_text, problems_of_trace, unified_of_trace
from ..formats.atropos import NOT_TRAINED
from ..store.packed import GroupFacts, facts_of_rewards, with_use


class LineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A group's columns; as in `store.rows.GroupRow` and `store.packed.GroupFacts`."""

    group_id: str
    env: str
    size: int
    tokens: int
    max_length: int
    policy_version: int
    created_at: float
    facts: GroupFacts


def facts_of_line(line: bytes, place: str) -> LineFacts | None:
    """Returns the facts of a line; None if it is JSON of another kind."""
    try:
        return _facts(_DECODER.decode(line), place)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{place} is not JSON: {error}.", place=place) from error


def group_of_line(line: bytes, place: str) -> Group:
    value = decoded(line, place)
    try:
        return group_record(group_of(value, place))
    except (TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
        raise InputError(f"{place} is not a group: {error}.", place=place) from error


_Count = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**53)]
"""A number that the index can hold, also a sum of such."""


class _Usage(msgspec.Struct, frozen=True):
    seconds: float = 0.0
    completion_tokens: _Count = 0
    ended_by: str = "agent"


class _Rollout(msgspec.Struct):
    reward: float | None = None
    turns: _Count = 0
    truncated: bool = False
    flags: list[str] = []
    usage: _Usage = _Usage()


class _Origin(msgspec.Struct):
    group_id: str
    env: str
    task_id: str
    rollouts: list[_Rollout]
    split: str = "train"
    model: str = ""
    policy_version: _Count = -1
    created_at: float = 0.0
    reward_range: dict[str, float | None] | None = None


class _Line(msgspec.Struct):
    """The part of a line that a list needs; the decoder skips the rest."""

    tokens: list[msgspec.Raw]
    scores: list[float]
    envserver: _Origin | None = None
    env_id: Any = None
    group_id: str | None = None


_DECODER: Final = msgspec.json.Decoder(_Line)


def _facts(line: _Line, place: str) -> LineFacts:
    lengths = [_length(token) for token in line.tokens]
    origin = line.envserver or _adopted(line, place)
    rollouts, bounds = origin.rollouts, origin.reward_range
    solves = range_from_json(bounds) if bounds is not None else None
    facts = facts_of_rewards([rollout.reward for rollout in rollouts], origin.task_id, solves)
    return LineFacts(
        group_id=origin.group_id or names_of_foreign(None, None, place)[1],
        env=origin.env,
        size=len(rollouts),
        tokens=sum(lengths),
        max_length=max(lengths, default=0),
        policy_version=origin.policy_version,
        created_at=origin.created_at,
        facts=with_use(facts, origin, rollouts),
    )


def _length(tokens: msgspec.Raw) -> int:
    inner = bytes(tokens)[1:-1]
    return inner.count(b",") + bool(inner.strip())


def _adopted(line: _Line, place: str) -> _Origin:
    env, group_id = names_of_foreign(line.env_id, line.group_id, place)
    rollouts = [_Rollout(reward=score, turns=1) for score in line.scores]
    return _Origin(group_id=group_id, env=env, task_id=group_id, rollouts=rollouts)


_BUFFER: Final = 1 << 20
_COMPRESSED: Final = (".gz", ".zst")
_MOST_ROLLOUTS: Final = 256
"""Documents of one task beyond this are another group."""


class Found(msgspec.Struct, frozen=True):
    """A group; `start`, `length`: bytes of its line; `body`: its line, where the file lacks it."""

    facts: LineFacts
    start: int
    length: int
    line: int
    body: bytes | None


class FileScan:
    def __init__(self, path: Path, offset: int = 0, line: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.line = line
        self.disk_bytes = 0
        """Bytes read, as they are on disk."""
        self.is_compressed = path.name.endswith(_COMPRESSED)
        self.is_document = path.name.endswith(".json")

    def found(self, documents: Documents) -> Iterator[Found | InputError]:
        """Yields what comes after `offset`, which moves on."""
        try:
            if self.is_document:
                data = self.path.read_bytes()
                self.offset = self.disk_bytes = len(data)
                yield from documents.add(decoded(data, str(self.path)), str(self.path))
            elif self.is_compressed:
                with opened(self.path, self._count) as file:
                    yield from self._lines(file, documents)
            else:
                with self.path.open("rb", buffering=_BUFFER) as file:
                    self._go_on(file)
                    yield from self._lines(file, documents)
        except InputError as error:  # a compressed file is damaged, or a document is not JSON
            yield error
        except OSError as error:
            yield InputError(f"{self.path} cannot be read: {error.strerror}.")

    def _go_on(self, file: IO[bytes]) -> None:
        file.seek(max(0, self.offset - 1))
        if self.offset and file.read(1) != b"\n" and file.read(1) == b"\n":
            self.offset += 1
        file.seek(self.offset)

    def _count(self, read: int) -> None:
        self.disk_bytes += read

    def _lines(self, file: IO[bytes], documents: Documents) -> Iterator[Found | InputError]:
        for line in file:
            if not line.endswith(b"\n") and not is_json(line):
                return  # it is being written, or its writer was killed
            start, self.offset, self.line = self.offset, self.offset + len(line), self.line + 1
            if not self.is_compressed:
                self.disk_bytes = self.offset
            if line.strip():
                yield from self._of_line(line, start, documents)

    def _of_line(
        self, line: bytes, start: int, documents: Documents
    ) -> Iterator[Found | InputError]:
        place = f"{self.path}, line {self.line}"
        try:
            facts = facts_of_line(line, place)
            if facts is None:
                yield from documents.add(decoded(line, place), place)
                return
        except InputError as error:
            yield error
            return
        yield from documents.flush()
        body = line if self.is_compressed else None
        yield Found(facts, start, len(line), self.line, body)


class Documents:
    """Collects documents of one task, until one of another task comes."""

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []
        self._place = ""
        self._task = ("", "")

    @property
    def are_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, value: Any, place: str) -> Iterator[Found | InputError]:
        """Takes a document; yields the group that it ends."""
        document = unified_document(value, place)
        task = task_of(document)
        is_other = not self._waiting or task != self._task
        if is_other or len(self._waiting) >= _MOST_ROLLOUTS:
            yield from self.flush()
            self._task, self._place = task, place
        self._waiting.append(document)

    def flush(self) -> Iterator[Found | InputError]:
        if not self._waiting:
            return
        documents, self._waiting = self._waiting, []
        task, self._task = self._task, ("", "")
        try:
            line = group_of_documents(documents, task[1])
            body = orjson.dumps(line, default=str)
            facts = facts_of_line(body, self._place)
            if facts is None:
                raise ValueError("a value has the wrong type")
        except (InputError, TypeError, ValueError, LookupError, AttributeError) as error:
            yield InputError(f"{self._place} is not a trajectory: {error}.", place=self._place)
        else:
            yield Found(facts, 0, 0, 0, body)


Json = dict[str, Any]

_PLAIN: Final = ("hooks", "egress", "flags", "components")


def unified_document(value: Any, place: str) -> Json:
    if isinstance(value, dict):
        if isinstance(value.get("actions"), list) and isinstance(value.get("metadata"), dict):
            return value
        if "steps" in value and "outcome" in value:
            problems = problems_of_trace(value)
            if not problems:
                return unified_of_trace(value, domain=_domain(value))
            raise InputError(f"{place} is not a valid trace: {problems[0]}.", place=place)
    raise InputError(
        f"{place} is not a group, a unified trajectory or a trace.",
        hint="`envserver view` reads what process, evaluate and export write.",
        place=place,
    )


def task_of(document: Json) -> tuple[str, str]:
    """Returns the group or the task: equal for documents of one group."""
    facts = document["metadata"]
    return str(document.get("domain") or ""), str(facts.get("group_id") or _task(document))


def group_of_documents(documents: Sequence[Json], group_id: str) -> Json:
    line: Json = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
    rollouts = [
        _rollout(document, number, group_id, line) for number, document in enumerate(documents)
    ]
    first = documents[0]
    facts = first["metadata"]
    line["envserver"] = {
        "group_id": str(facts.get("group_id") or group_id),
        "env": str(first.get("domain") or "unknown"),
        "task_id": _task(first),
        "split": str(facts.get("split") or "train"),
        "seed": facts.get("seed") or 0,
        "model": str(facts.get("model") or ""),
        "created_at": float(facts.get("end_ts") or 0.0),
        "rollouts": rollouts,
    }
    return line


def _task(document: Json) -> str:
    facts = document["metadata"]
    return str(facts.get("task_id") or facts.get("scenario") or document.get("task_id") or "")


def _domain(trace: Json) -> str:
    return str((trace.get("metadata") or {}).get("env") or "trace")


def _rollout(document: Json, number: int, group_id: str, line: Json) -> Json:
    facts = document["metadata"]
    conversations = [
        sequence for sequence in facts.get("sequences") or () if sequence.get("messages")
    ]
    rows = [sequence for sequence in facts.get("sequences") or () if sequence.get("tokens")] or [{}]
    start = len(line["tokens"])
    for row in rows:
        _add_row(line, row, facts.get("reward"))
    seconds = max(0.0, float(facts.get("end_ts") or 0) - float(facts.get("start_ts") or 0))
    actions = document["actions"]
    return {
        "rollout_id": str(
            facts.get("rollout_id") or facts.get("run_id") or f"{group_id}-r{number}"
        ),
        "rows": list(range(start, start + len(rows))),
        "agents": [row.get("agent") for row in rows],
        "reward": facts.get("reward"),
        "output": document.get("final_answer"),
        "finish_reason": facts.get("finish_reason"),
        "limit": facts.get("limit"),
        "truncated": facts.get("finish_reason") == "length",
        "turns": facts.get("turns") or sum(action.get("tool") == "reason" for action in actions),
        "messages": conversations[0]["messages"] if conversations else _messages(document),
        "others": [_other(conversation) for conversation in conversations[1:]],
        "actions": actions,
        "usage": {"seconds": seconds, "ended_by": facts.get("limit") or "agent"},
        **{name: facts[name] for name in _PLAIN if facts.get(name)},
    }


def _add_row(line: Json, row: Json, reward: float | None) -> None:
    tokens, masks = row.get("tokens") or [], row.get("masks") or []
    line["tokens"].append(tokens)
    line["masks"].append(
        [token if mask else NOT_TRAINED for token, mask in zip(tokens, masks, strict=False)]
    )
    line["inference_logprobs"].append(row.get("logprobs") or [0.0] * len(tokens))
    line["scores"].append(reward or 0.0)


def _other(conversation: Json) -> Json:
    return {
        "agent": conversation.get("agent"),
        "trained": bool(conversation.get("trained", True)),
        "model": "",
        "messages": conversation["messages"],
        "tools": [],
        "turns": sum(message.get("role") == "assistant" for message in conversation["messages"]),
        "completion_tokens": 0,
    }


def _messages(document: Json) -> list[Json]:
    question = document.get("question")
    messages: list[Json] = [{"role": "user", "content": question}] if question else []
    for number, action in enumerate(document["actions"]):
        tool, output = str(action.get("tool")), json_text(action.get("output"))
        if action.get("error") and action.get("output") is None:
            output = f"Error: {action['error']}"
        if tool in ("reason", FINALIZE):
            messages.append({"role": "assistant", "content": output})
            continue
        call = {"name": tool, "arguments": json_text(action.get("input"))}
        called = {"id": f"call-{number}", "type": "function", "function": call}
        messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
        messages.append({"role": "tool", "tool_call_id": called["id"], "content": output})
    return messages

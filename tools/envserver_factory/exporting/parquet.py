"""Delivered rollouts as Parquet: one row for each training row, typed columns, streamed.

Row groups are cut by bytes, so memory holds one of them. Nothing is rounded or left out: what each
environment shapes for itself is JSON text in a column that ends in `_json`. A rollout without
training rows has one row without tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
from envserver_records.errors import ConfigError, InputError
from envserver_records.extras import install_command
from envserver_records.records import Json, Message, text_of

from envserver.export.stored import StoredGroup, StoredRollout, StoredRow

from .formats import Format, Options, Row, Written

Table = Any
"""A `pyarrow.Table`, which has no types."""
Schema = Any

FOLDER = "data"
ROW_GROUP_BYTES = 32 * 2**20
"""Before compression; bounds memory of writer and reader."""
_BYTES_A_TOKEN = 9
_BYTES_BESIDE = 1024

_PLAIN = (
    *("rollout_id", "group_id", "env", "domain", "task_id", "split", "model", "finish_reason"),
    *("limit", "reward", "turns", "truncated", "index", "attempt", "seed", "policy_version"),
    *("created_at", "flags", "length", "sampled"),
)
"""Columns that are fields of a rollout."""
_AS_JSON = (
    *("rewards", "turn_rewards", "components", "metrics", "agent_metrics", "output"),
    *("tools", "actions", "others", "usage", "hooks", "egress"),
)
"""Fields that become a column NAME_json."""
_TEXTS = ("role", "content", "reasoning_content", "name", "tool_call_id")


class Parquet(Format):
    name, suffix = "parquet", ".parquet"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        _pyarrow("pyarrow.parquet")

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        for rollout in kept:
            yield from rows_of(rollout, group.line.get("generation_params"))

    def writer(self, folder: Path, shard_rows: int | None) -> ParquetShards:
        return ParquetShards(folder, shard_rows)


class ParquetShards:
    """Writes `data/part-00000.parquet`, ...; without any row one file without rows.

    They have a folder of their own because pandas and pyarrow read a whole folder.
    """

    def __init__(
        self, folder: Path, shard_rows: int | None, *, row_group_bytes: int = ROW_GROUP_BYTES
    ) -> None:
        self._folder, self._shard_rows = folder, shard_rows
        self._row_group_bytes = row_group_bytes
        self._written: list[Written] = []
        self._begin()

    def put(self, row: Row) -> None:
        assert isinstance(row, dict)
        if self._rows == self._shard_rows:
            self._end()
            self._begin()
        self._waiting.append(row)
        self._rows += 1
        self._bytes += _size(row)
        if self._bytes >= self._row_group_bytes:
            self._flush()

    def close(self) -> list[Written]:
        self._end()
        return self._written

    def _begin(self) -> None:
        parquet = _pyarrow("pyarrow.parquet")
        self._path = self._folder / FOLDER / f"part-{len(self._written):05d}{Parquet.suffix}"
        self._path.parent.mkdir(exist_ok=True)
        self._waiting: list[Json] = []
        self._bytes = self._rows = 0
        self._file = parquet.ParquetWriter(self._path, schema(), compression="zstd")

    def _end(self) -> None:
        self._flush()
        self._file.close()
        self._written.append(Written(f"{FOLDER}/{self._path.name}", self._rows))

    def _flush(self) -> None:
        if self._waiting:
            table = table_of(self._waiting)
            self._file.write_table(table, row_group_size=len(table))
            self._waiting, self._bytes = [], 0


def rows_of(rollout: StoredRollout, generation_params: Json | None = None) -> list[Json]:
    messages = [_typed(message) for message in rollout.messages]
    exact = all(map(_says_all, messages, rollout.messages))
    shared = {name: getattr(rollout, name) for name in _PLAIN}
    shared |= {f"{name}_json": _json(getattr(rollout, name)) for name in _AS_JSON}
    shared["generation_params_json"] = _json(generation_params)
    shared["messages"] = messages
    shared["messages_json"] = None if exact else _json(rollout.messages)
    shared["rows"] = len(rollout.rows)
    return [
        shared
        | _tokens(number, row)
        | {"agent_reward": rollout.rewards.get(row.agent or "", rollout.reward)}
        for number, row in enumerate(rollout.rows or [_WITHOUT_TOKENS])
    ]


_WITHOUT_TOKENS = StoredRow(
    tokens=np.empty(0, np.int32),
    mask=np.empty(0, np.uint8),
    logprobs=np.empty(0, np.float32),
    agent=None,
    flags=[],
    versions=[],
)


def table_of(rows: Sequence[Json]) -> Table:
    pa = _pyarrow("pyarrow")
    columns = []
    for field in schema():
        try:
            columns.append(_column(pa, field, [row[field.name] for row in rows]))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            first, last = rows[0]["rollout_id"], rows[-1]["rollout_id"]
            raise InputError(
                f"A {field.name} of the rollouts {first} to {last} is not a {field.type}: {error}."
            ) from error
    return pa.Table.from_arrays(columns, schema=schema())


@functools.cache
def schema() -> Schema:
    """Columns of a rollout repeat in each of its rows; `row` counts them from 0."""
    pa = _pyarrow("pyarrow")
    text, number, real = pa.string(), pa.int64(), pa.float64()
    function = pa.struct([("name", text), ("arguments", text)])
    call = pa.struct([("id", text), ("type", text), ("function", function)])
    message = pa.struct([*((name, text) for name in _TEXTS), ("tool_calls", pa.list_(call))])
    image = pa.struct(
        [
            *(("sha256", text), ("offset", number), ("length", number)),
            *(("grid", pa.list_(number)), ("data", pa.binary())),
        ]
    )
    span = pa.struct([("version", number), ("start", number), ("end", number)])
    return pa.schema(
        [
            *((name, text) for name in ("rollout_id", "group_id", "env", "domain", "task_id")),
            *((name, text) for name in ("split", "model", "finish_reason", "limit")),
            ("reward", real),
            ("turns", number),
            ("truncated", pa.bool_()),
            *((name, number) for name in ("index", "attempt", "seed", "policy_version")),
            ("created_at", real),
            ("flags", pa.list_(text)),
            ("length", number),
            ("sampled", number),
            ("messages", pa.list_(message)),
            ("messages_json", text),
            *((f"{name}_json", text) for name in (*_AS_JSON, "generation_params")),
            ("rows", number),
            ("row", number),
            ("agent", text),
            ("agent_reward", real),
            ("row_flags", pa.list_(text)),
            ("versions", pa.list_(span)),
            ("tokens", pa.list_(pa.int32())),
            ("mask", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float32())),
            ("images", pa.list_(image)),
        ]
    )


def _tokens(number: int, row: StoredRow) -> Json:
    return {
        "row": number,
        "agent": row.agent,
        "row_flags": row.flags,
        "versions": [
            {"version": version, "start": start, "end": end} for version, start, end in row.versions
        ],
        "tokens": np.asarray(row.tokens, np.int32),
        "mask": np.asarray(row.mask, np.bool_),
        "logprobs": np.asarray(row.logprobs, np.float32),
        "images": [msgspec.structs.asdict(image) for image in row.images],
    }


def _typed(message: Message) -> Json:
    """Returns what the columns can hold of a message; of content in parts the text."""
    found = {name: _text(message.get(name)) for name in _TEXTS if name != "content"}
    content = message.get("content")
    found["content"] = _text(text_of(message)) if isinstance(content, list) else _text(content)
    calls = message.get("tool_calls")
    typed = [_typed_call(call) for call in calls] if isinstance(calls, list) else None
    return {**found, "tool_calls": typed}


def _typed_call(call: Any) -> Json:
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    return {
        "id": _text(call.get("id")),
        "type": _text(call.get("type")),
        "function": {
            "name": _text(function.get("name")),
            "arguments": _json(arguments) if isinstance(arguments, dict) else _text(arguments),
        },
    }


def _says_all(typed: Json, message: Message) -> bool:
    return bool(_without_nulls(typed) == _without_nulls(message))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _text(value: Any) -> str | None:
    """Returns text, None otherwise; an unpaired surrogate, which UTF-8 cannot hold, becomes "?"."""
    if not isinstance(value, str):
        return None
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _json(value: Any) -> str | None:
    """Returns JSON text; None stays None."""
    if value is None:
        return None
    try:
        return orjson.dumps(value, default=msgspec.to_builtins).decode()
    except (TypeError, orjson.JSONEncodeError):  # integers over 64 bits, unpaired surrogates
        return json.dumps(value, default=msgspec.to_builtins)


def _size(row: Json) -> int:
    texts = sum(len(value) for name, value in row.items() if isinstance(value, str))
    said = sum(len(message["content"] or "") for message in row["messages"])
    seen = sum(len(image["data"]) for image in row["images"])
    return _BYTES_BESIDE + texts + said + seen + _BYTES_A_TOKEN * len(row["tokens"])


def _column(pa: Any, field: Any, values: list[Any]) -> Any:
    if field.name not in ("tokens", "mask", "logprobs"):
        plain = [_text(value) for value in values] if pa.types.is_string(field.type) else values
        return pa.array(plain, field.type)
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    flat = pa.array(np.concatenate(values), field.type.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=field.type)


def _pyarrow(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed.", hint=install_command("data")
        ) from error

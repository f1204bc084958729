"""Data of a domain: loaded once, shared by all episodes; each episode overlays its changes.

Nothing is copied until an episode changes it, and then only the changed record. Results of `table`,
`get` and `rows` may be shared, so they are only read; those of `edit` and `edit_table` may be
changed. Hashes are tau2-bench's: SHA-256 of the content as JSON with sorted keys, so that 1, 1.0
and "1" differ, and an absent field differs from null.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from envserver_records.tasks import Json
from pydantic import BaseModel

Record = dict[str, Any]


class Base:
    """The data of one side of a domain, as in its file; never changed. `keyed` fields of the model
    map keys to records, whose changes are kept one by one; other fields are kept as a whole."""

    def __init__(self, model: type[BaseModel], content: Json, keyed: Collection[str] = ()) -> None:
        self.model = model
        self.keyed = frozenset(keyed)
        self.tables: Mapping[str, Any] = model.model_validate(content).model_dump()

    @cached_property
    def records_json(self) -> dict[str, dict[str, str]]:
        return {
            name: {key: canonical_json(record) for key, record in self.tables[name].items()}
            for name in self.tables
            if name in self.keyed
        }

    @cached_property
    def hash(self) -> str:
        return Database(self).computed_hash()


class Database:
    """`base` with the changes of one episode."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self._records: dict[str, dict[str, Record]] = {}
        self._tables: Json = {}

    def table(self, name: str) -> Any:
        if name in self._tables:
            return self._tables[name]
        try:
            base = self.base.tables[name]
        except KeyError:
            model = self.base.model.__name__
            raise AttributeError(f"{model!r} object has no attribute {name!r}") from None
        own = self._records.get(name)
        return {**base, **own} if own else base

    def get(self, name: str, key: Any) -> Record | None:
        own = self._records.get(name)
        if own is not None and key in own:
            return own[key]
        base = self.base.tables.get(name)
        if base is None:
            return self.table(name)  # type: ignore[no-any-return]  # it raises
        found: Record | None = base.get(key)
        return found

    def rows(self, name: str) -> Iterable[Record]:
        table: Mapping[str, Record] = self.table(name)
        return table.values()

    def edit(self, name: str, key: str) -> Record:
        own = self._records.setdefault(name, {})
        if key not in own:
            own[key] = copied(self.base.tables[name][key])
        return own[key]

    def put(self, name: str, key: str, record: Record) -> None:
        self._records.setdefault(name, {})[key] = record

    def edit_table(self, name: str) -> Any:
        """Returns a whole table that is not keyed, to be changed in place."""
        if name not in self._tables:
            self._tables[name] = copied(self.base.tables[name])
        return self._tables[name]

    def merge(self, update: Json) -> None:
        """Lays `update` over the content: objects are merged, all else (lists too) replaced."""
        touched: Json = {
            name: {} if name in self.base.keyed else self.table(name) for name in self.base.tables
        }
        for name, value in update.items():
            if name in self.base.keyed and isinstance(value, Mapping):
                touched[name] = {
                    key: merged(self.get(name, key), part) for key, part in value.items()
                }
            else:
                touched[name] = merged(touched.get(name), value)
        valid = self.base.model.model_validate(touched).model_dump()
        for name in update:
            if name in self.base.keyed:
                self._records.setdefault(name, {}).update(valid[name])
            elif name in valid:
                self._tables[name] = valid[name]

    def content(self) -> Json:
        return {name: self.table(name) for name in self.base.tables}

    @property
    def changed(self) -> bool:
        """Did the episode touch anything (even if it put back what there was)?"""
        return bool(self._records or self._tables)

    def hash(self) -> str:
        """The hash of the whole content; slow (tens of milliseconds) after a change."""
        return self.computed_hash() if self.changed else self.base.hash

    def same_as(self, other: Database) -> bool:
        """Are the hashes equal? Looks only at what either of them touched."""
        if self.base is not other.base:
            return self.hash() == other.hash()
        return all(self._json_of(*part) == other._json_of(*part) for part in self._touched(other))

    def _touched(self, other: Database) -> Iterator[tuple[str, str | None]]:
        for name in {*self._tables, *other._tables}:
            yield name, None
        for name in {*self._records, *other._records}:
            for key in {*self._records.get(name, ()), *other._records.get(name, ())}:
                yield name, key

    def _json_of(self, name: str, key: str | None) -> str | None:
        if key is None:
            return canonical_json(self.table(name))
        record = self.get(name, key)
        return None if record is None else canonical_json(record)

    def computed_hash(self) -> str:
        parts = (f"{json.dumps(name)}: {self._table_json(name)}" for name in sorted(self.content()))
        return hashlib.sha256(f"{{{', '.join(parts)}}}".encode()).hexdigest()

    def _table_json(self, name: str) -> str:
        if name not in self.base.keyed:
            return canonical_json(self.table(name))
        own = {key: canonical_json(record) for key, record in self._records.get(name, {}).items()}
        records = {**self.base.records_json[name], **own}
        pairs = ", ".join(f"{json.dumps(key)}: {records[key]}" for key in sorted(records))
        return f"{{{pairs}}}"


def canonical_json(value: Any) -> str:
    """JSON with sorted keys; what JSON does not know is written as `str` has it."""
    return json.dumps(value, sort_keys=True, default=str)


def hash_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def copied(value: Any) -> Any:
    """A copy of JSON-like data; several times faster than `copy.deepcopy`."""
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [copied(part) for part in value]
    return value


def merged(old: Any, new: Any) -> Any:
    """`new` laid over `old`: objects are merged, anything else is replaced."""
    if not (isinstance(old, dict) and isinstance(new, Mapping)):
        return copied(new)
    return {**old, **{key: merged(old.get(key), part) for key, part in new.items()}}

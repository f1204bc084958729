"""The formats of `envserver export`: one name and one small class each.

A format turns the kept rollouts of a group into rows. A row is a dict, which becomes a line of a
JSONL shard, or a `NamedFile`, which becomes a file. A format with another destination has a
`writer`. To add a format: a class, and a line in `FORMATS`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import orjson
from envserver_records.errors import ConfigError, EnvserverError, InputError, NotFoundError
from envserver_records.extras import install_command
from envserver_records.files import replace_folder, replacing, storing
from envserver_records.records import Json, Message, chained, digest_after
from numpy.typing import NDArray

from envserver.export.jsonl import lock
from envserver.export.stored import StoredGroup, StoredRollout
from envserver.export.unified import file_name, label_of, problems_of, trace_of, unified_of


@dataclass(frozen=True)
class NamedFile:
    """A whole file of an export. `path` is relative to its folder, with `/`."""

    path: str
    data: bytes


Row = Json | NamedFile
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


@dataclass(frozen=True)
class Written:
    """A file that a writer made, relative to the export's folder, with its number of rows."""

    path: str
    rows: int


@dataclass(frozen=True)
class Options:
    """The caller's options.

    Args:
        tokens: include training rows, where a format has both.
        label: label of traces; "auto": by their rewards.
        margin: minimum difference between the rewards of a pair.
        jsonl: write JSONL where a format otherwise writes a file for each rollout.
        embed: sentence-transformers model for the steps of traces; "": no embeddings.
        tokenizer: tokenizer that shows tokens (see `token_texts`); unset: by the model's name.
    """

    tokens: bool = False
    label: str = "auto"
    margin: float = 0.0
    title: str = ""
    jsonl: bool = False
    embed: str = ""
    embed_cache: Path | None = None
    tokenizer: str = ""


class Format(ABC):
    """A format of an export. One instance for each export, so it may count."""

    name: str
    suffix = ".jsonl"

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        """`kept`: rollouts of `group`, in order, at least one."""

    def document(self, path: str, document: Json) -> Row:
        """Returns a document as a file of its own, or with `Options.jsonl` as a line."""
        if self.options.jsonl:
            return document
        return NamedFile(path, orjson.dumps(document, option=_INDENTED))

    def writer(self, folder: Path, shard_rows: int | None) -> Writer:
        """Returns a new writer; a format with another destination has its own.

        It writes into `folder`, which is empty, files of at most `shard_rows` rows; None: one file
        for all.
        """
        return Files(folder, shard_rows)


class Writer(Protocol):
    """Writes rows into files of a folder. The caller reports errors of the file system."""

    def put(self, row: Row) -> None:
        """Writes one row. Raises ConfigError: it does not fit into the one file."""

    def close(self) -> list[Written]:
        """Closes all files and returns them."""
        ...


FORMATS = {
    "atropos": "formats:Atropos",
    "messages": "formats:Messages",
    "unified": "formats:Unified",
    "dpo": "formats:Dpo",
    "traces": "formats:Traces",
    "parquet": "parquet:Parquet",
    "html": "html:Html",
    "inspect": "inspect:Inspect",
}
"""`module:factory` by name; a factory takes Options."""


def format_of(name: str, options: Options) -> Format:
    """Raises ConfigError: there is no such format, or what it needs is not installed."""
    if name not in FORMATS:
        raise ConfigError(
            f"There is no format {name!r} to export to.", hint=f"There are: {', '.join(FORMATS)}."
        )
    module, _, factory = FORMATS[name].partition(":")
    made: Format = getattr(importlib.import_module(f".{module}", __package__), factory)(options)
    return made


MANIFEST = "MANIFEST.json"


class Files:
    def __init__(self, folder: Path, shard_rows: int | None, *, chained: bool = False) -> None:
        self._chained = chained
        self._folder = folder
        self._shard_rows = shard_rows
        self._shard: IO[bytes] | None = None
        self._rows = 0
        self._shards: list[Written] = []
        self._has_named = False

    def put(self, row: Row) -> None:
        if isinstance(row, NamedFile):
            self._write_named(row)
        else:
            self._append(row)

    def close(self) -> list[Written]:
        """Returns the shards; every other file in the folder is one row."""
        self._end_shard()
        return self._shards

    def _append(self, row: Json) -> None:
        if self._shard is None:
            path = self._folder / f"part-{len(self._shards):05d}.jsonl"
            self._shard, self._rows, self._previous = path.open("wb"), 0, ""
        if self._chained:
            row = {key: value for key, value in row.items() if key != "chain"}
        data = orjson.dumps(
            row, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
        )
        if self._chained:
            data = chained(data, self._previous)
            self._previous = digest_after(data)
        self._shard.write(data)
        self._rows += 1
        if self._rows == self._shard_rows:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._shard is None:
            return
        with self._shard as file:
            file.flush()
            os.fsync(file.fileno())
        self._shards.append(Written(Path(file.name).name, self._rows))
        self._shard = None

    def _write_named(self, file: NamedFile) -> None:
        parts = file.path.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise InputError(f"{file.path!r} cannot be the name of a file.", place=file.path)
        if self._shard_rows is None and self._has_named:
            raise needs_folder("Each record is a file of its own")
        self._has_named = True
        path = self._folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as made:
            made.write(file.data)


@dataclass(frozen=True)
class Place:
    """An export in progress: `folder` becomes `out`; `single`: one file with its manifest beside
    it."""

    folder: Path
    out: Path
    single: bool


@contextlib.contextmanager
def place_for(out: Path, *, overwrite: bool, single: bool) -> Iterator[Place]:
    """Makes an empty folder beside `out`; it is removed unless `finish` made it the export."""
    _check_free(out, overwrite)
    beside = out.absolute().parent / f".{out.name}.partial"
    with writing(out):
        beside.mkdir(parents=True, exist_ok=True)
        locked = (beside / "lock").open("wb")
    with locked:
        lock(locked, out)
        try:
            if (beside / "old").exists() and not out.exists():
                (beside / "old").rename(out)  # killed while it was being replaced
            folder = beside / "export"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield Place(folder, out, single)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def finish(place: Place, written: list[Written], facts: Json) -> Json:
    """Writes the manifest, makes the folder the export; returns the number of `files`, their
    `bytes`."""
    rows = {part.path: part.rows for part in written}
    if place.single:
        _rename_single(place)
        rows = {place.out.name: sum(rows.values())}
    made = place.folder.parent / MANIFEST
    total = _write_manifest(made, place.folder, rows, facts)
    _move(place, made)
    return total


def _rename_single(place: Place) -> None:
    files = [path for path in place.folder.rglob("*") if path.is_file()]
    if len(files) > 1:
        raise needs_folder(f"The export has {len(files)} files")
    if files:
        files[0].rename(place.folder / place.out.name)
    else:
        (place.folder / place.out.name).touch()


def needs_folder(reason: str) -> ConfigError:
    return ConfigError(f"{reason}: --out must be a folder, not one file.", hint="Use --out FOLDER.")


def writing(out: Path) -> AbstractContextManager[None]:
    """Turns errors of the file system within the block into ours."""
    return storing(out, "No part of it was kept.")


def _check_free(out: Path, overwrite: bool) -> None:
    there = any(out.iterdir()) if out.is_dir() else out.exists()
    if there and not overwrite:
        raise ConfigError(f"{out} exists.", hint="Name another place, or --overwrite this one.")
    if there and out.is_dir() and not (out / MANIFEST).is_file():
        raise ConfigError(
            f"{out} was not made by an export: it has no {MANIFEST}.",
            hint="Name another place; only exports of envserver are replaced.",
        )


def _write_manifest(path: Path, folder: Path, rows: dict[str, int], facts: Json) -> Json:
    """Writes one file entry on each line, so that only one is in memory."""
    number = size = 0
    with path.open("wb") as out:
        out.write(b'{"files":[')
        for name, file in _files(folder):
            digest, length = _digest(file)
            entry = {"path": name, "bytes": length, "rows": rows.get(name, 1), "sha256": digest}
            out.write((b",\n" if number else b"\n") + orjson.dumps(entry))
            number += 1
            size += length
        rest = orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        out.write(b"\n]," + rest.removeprefix(b"{"))
        out.flush()
        os.fsync(out.fileno())
    return {"files": number, "bytes": size}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(root, name)
            yield path.relative_to(folder).as_posix(), path


def _digest(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size


def _move(place: Place, manifest: Path) -> None:
    out = place.out
    if place.single:
        manifest.replace(out.with_name(f"{out.name}.{MANIFEST}"))
        (place.folder / out.name).replace(out)
        return
    manifest.replace(place.folder / MANIFEST)
    replace_folder(place.folder, out, place.folder.parent / "old")


class Messages(Format):
    """Rows {"messages", "reward", "env", "task_id"} (and "tools"), the best of a group first."""

    name = "messages"

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        for rollout in sorted(kept, key=lambda other: -(other.reward or 0.0)):
            if not is_conversation(rollout):
                continue
            row = {
                "messages": rollout.messages,
                "reward": rollout.reward,
                "env": rollout.env,
                "task_id": rollout.task_id,
            }
            yield {**row, "tools": rollout.tools} if rollout.tools else row


def is_conversation(rollout: StoredRollout) -> bool:
    return any(message.get("role") == "assistant" for message in rollout.messages)


class Dpo(Format):
    """Pairs the best rollout of a group with the worst, the second best with the second worst, ...

    Rewards of a pair differ by at least `Options.margin`. `prompt + chosen` and `prompt + rejected`
    are the conversations; the prompt ends before the model's first message.
    """

    name = "dpo"

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        usable = [
            rollout for rollout in kept if rollout.reward is not None and is_conversation(rollout)
        ]
        ranked = sorted(usable, key=lambda rollout: -(rollout.reward or 0.0))
        for better, worse in zip(ranked, reversed(ranked), strict=True):
            difference = (better.reward or 0.0) - (worse.reward or 0.0)
            if difference <= 0 or difference < self.options.margin:
                return
            prompt = prompt_of(better.messages)
            if prompt and prompt == prompt_of(worse.messages):
                yield _pair(better, worse, prompt)


def prompt_of(messages: list[Message]) -> list[Message]:
    return list(takewhile(lambda message: message.get("role") != "assistant", messages))


def _pair(better: StoredRollout, worse: StoredRollout, prompt: list[Message]) -> Row:
    pair: Json = {
        "prompt": prompt,
        "chosen": better.messages[len(prompt) :],
        "rejected": worse.messages[len(prompt) :],
        "env": better.env,
        "task_id": better.task_id,
        "chosen_reward": better.reward,
        "rejected_reward": worse.reward,
    }
    return {**pair, "tools": better.tools} if better.tools else pair


_OF_ROWS = (
    *("tokens", "masks", "scores", "messages", "inference_logprobs", "ref_logprobs", "overrides"),
    *("advantages", "images", "distill_token_ids", "distill_logprobs"),
)
"""Keys of a line with one entry for each row."""


class Atropos(Format):
    """Writes lines that every reader of `process` files understands, chained as those are."""

    name = "atropos"

    def writer(self, folder: Path, shard_rows: int | None) -> Writer:
        return Files(folder, shard_rows, chained=True)

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        if len(kept) == len(group.rollouts):
            yield group.line
        else:
            yield kept_line(group, {rollout.rollout_id for rollout in kept})


def kept_line(group: StoredGroup, rollout_ids: set[str]) -> Json:
    """Returns the line with these rollouts only, without the whole group's advantages."""
    line = group.line
    rows: list[int] = []
    kept_rollouts = []
    for rollout in line["envserver"]["rollouts"]:
        if rollout["rollout_id"] in rollout_ids:
            begin = len(rows)
            rows += rollout["rows"]
            kept_rollouts.append({**rollout, "rows": list(range(begin, len(rows)))})
    columns = {key: [line[key][row] for row in rows] for key in _OF_ROWS if line.get(key)}
    envserver = {**line["envserver"], "rollouts": kept_rollouts}
    return {**line, **columns, "advantages": None, "envserver": envserver}


_LONGEST_NAME = 200


class Unified(Format):
    name = "unified"
    suffix = ".json"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._given: set[bytes] = set()

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        for rollout in kept:
            document = unified_of(rollout, tokens=self.options.tokens)
            alone = len(group.rollouts) == 1 and group.asked <= 1
            document["task_id"] = self._unique(document["task_id"], rollout, alone)
            domain = document["domain"]
            if problems := problems_of(document, domains=[domain]):
                raise InputError(
                    f"{group.place}, rollout {rollout.rollout_id} is not a trajectory: "
                    f"{problems[0]}.",
                    place=group.place,
                )
            yield self.document(f"{domain}/{document['task_id']}.json", document)

    def _unique(self, task_id: str, rollout: StoredRollout, alone: bool) -> str:
        which = hashlib.blake2b(rollout.rollout_id.encode(), digest_size=4).hexdigest()
        plain = _short(file_name(task_id))
        if alone and self._take(plain):
            return plain
        name = wanted = f"{plain}-{which}"
        number = 1
        while not self._take(name):
            number += 1
            name = f"{wanted}-{number}"
        return name

    def _take(self, name: str) -> bool:
        digest = hashlib.blake2b(name.lower().encode(), digest_size=16).digest()
        if digest in self._given:
            return False
        self._given.add(digest)
        return True


def _short(name: str) -> str:
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    kept = name.encode()[: _LONGEST_NAME - 20].decode(errors="ignore")
    return f"{kept}-{digest}"


Vector = NDArray[np.float32]

BATCH = 32
_LIBRARY = "sentence_transformers"
DIGITS = 7
"""Significant digits written: float32 has no more."""


class Embedder:
    """A text embedding model; loaded at the first text that is not in the cache."""

    def __init__(self, model: str, *, cache: Path | None = None, batch: int = BATCH) -> None:
        if importlib.util.find_spec(_LIBRARY) is None:
            raise ConfigError(
                "Embeddings need sentence-transformers.", hint=install_command("embeddings")
            )
        self.model = model
        self._cache = cache
        self._batch = batch
        self._encoder: Any = None
        self._lock = threading.Lock()
        self.computed = 0
        """Number of texts that the model embedded."""

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        """Returns float32[D] for each text, in order; equal texts are computed once."""
        with self._lock:
            known = {text: self._kept(text) for text in dict.fromkeys(texts)}
            found = {text: vector for text, vector in known.items() if vector is not None}
            new = [text for text in known if text not in found]
            for text, vector in zip(new, self._encoded(new) if new else [], strict=True):
                found[text] = vector
                self._keep(text, vector)
        return [found[text] for text in texts]

    def _encoded(self, texts: Sequence[str]) -> list[Vector]:
        if self._encoder is None:
            self._encoder = _load(self.model)
        self.computed += len(texts)
        vectors = self._encoder.encode(
            list(texts), batch_size=self._batch, show_progress_bar=False, convert_to_numpy=True
        )
        return [np.asarray(vector, np.float32) for vector in vectors]

    def _place(self, text: str) -> Path | None:
        if self._cache is None:
            return None
        content = f"{self.model}\0{text}".encode("utf-8", "surrogatepass")
        name = hashlib.sha256(content).hexdigest()
        return self._cache / name[:2] / f"{name}.npy"

    def _kept(self, text: str) -> Vector | None:
        """Returns the vector in the cache; a damaged one is computed again."""
        place = self._place(text)
        if place is None:
            return None
        try:
            vector = np.load(place, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        whole = vector.ndim == 1 and vector.dtype == np.float32 and bool(np.isfinite(vector).all())
        return vector if whole else None

    def _keep(self, text: str, vector: Vector) -> None:
        place = self._place(text)
        if place is None:
            return
        with storing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place, sync=False) as file:
                np.save(file, vector)


def embed_steps(trace: Json, embedder: Embedder) -> Json:
    """Returns `trace` with an `embedding` in each step with text."""
    steps = [dict(step) for step in trace["steps"]]
    said = [step for step in steps if str(step.get("text") or "").strip()]
    for step, vector in zip(said, embedder.embed([step["text"] for step in said]), strict=True):
        step["embedding"] = [float(f"{number:.{DIGITS}g}") for number in vector.tolist()]
    metadata = {**(trace.get("metadata") or {}), "embedder_id": embedder.model}
    return {**trace, "steps": steps, "metadata": metadata}


def _load(model: str) -> Any:
    library = importlib.import_module(_LIBRARY)
    try:
        return library.SentenceTransformer(model)
    except EnvserverError:
        raise
    except (OSError, ValueError) as error:
        words = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise NotFoundError(
            f"The embedding model {model!r} cannot be loaded: {words}",
            hint="Name a folder, or a model on the hub such as BAAI/bge-small-en-v1.5.",
        ) from error


class Traces(Format):
    """Traces, numbered from 1 for each model and label, in order of arrival."""

    name = "traces"
    suffix = ".json"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._embedder = (
            Embedder(options.embed, cache=options.embed_cache) if options.embed else None
        )
        self._numbers: Counter[tuple[str, str]] = Counter()

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        for rollout in kept:
            auto = self.options.label == "auto"
            label = label_of(rollout) if auto else self.options.label
            model = rollout.model or "model"
            self._numbers[model, label] += 1
            number = self._numbers[model, label]
            trace = trace_of(rollout, label=label, number=number)
            if self._embedder is not None:
                trace = embed_steps(trace, self._embedder)
            path = f"{file_name(model)}/{file_name(label)}/run_{number:03d}.json"
            yield self.document(path, trace)

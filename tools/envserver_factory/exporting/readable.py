"""`--to unified`: `<domain>/<task_id>.json` below the folder, or JSONL; and traces.

Ids are unique and independent of the order of groups: a rollout of a group of several has its
task's id with eight digits that identify it; a single one has the task's own id.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from envserver_records.errors import ConfigError, EnvserverError, InputError, NotFoundError
from envserver_records.extras import install_command
from envserver_records.files import replacing, storing
from numpy.typing import NDArray

from envserver.export.stored import StoredGroup, StoredRollout
from envserver.export.unified import file_name, label_of, problems_of, trace_of, unified_of

from .formats import NamedFile, Options, Row

_LONGEST_NAME = 200
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


class Unified:
    name = "unified"
    suffix = ".json"

    def __init__(self, options: Options) -> None:
        self._options = options
        self._given: set[bytes] = set()

    def rows(self, group: StoredGroup, kept: list[StoredRollout]) -> Iterator[Row]:
        for rollout in kept:
            document = unified_of(rollout, tokens=self._options.tokens)
            alone = len(group.rollouts) == 1 and group.asked <= 1
            document["task_id"] = self._unique(document["task_id"], rollout, alone)
            domain = document["domain"]
            if problems := problems_of(document, domains=[domain]):
                raise InputError(
                    f"{group.place}, rollout {rollout.rollout_id} is not a trajectory: "
                    f"{problems[0]}.",
                    place=group.place,
                )
            if self._options.jsonl:
                yield document
            else:
                path = f"{domain}/{document['task_id']}.json"
                yield NamedFile(path, orjson.dumps(document, option=_INDENTED))

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
Json = dict[str, Any]

BATCH = 32
_LIBRARY = "sentence_transformers"
DIGITS = 7
"""Significant digits written: float32 has no more."""


class Embedder:
    """A text embedding model; loaded at the first text that is not in the cache."""

    def __init__(
        self,
        model: str,
        *,
        cache: Path | None = None,
        batch: int = BATCH,
        device: str | None = None,
    ) -> None:
        if importlib.util.find_spec(_LIBRARY) is None:
            raise ConfigError(
                "Embeddings need sentence-transformers.", hint=install_command("embeddings")
            )
        self.model = model
        self._cache = cache
        self._batch = batch
        self._device = device
        self._encoder: Any = None
        self._lock = threading.Lock()
        self.computed = 0
        """Number of texts that the model embedded."""

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        """Returns float32[D] for each text, in order; equal texts are computed once."""
        with self._lock:
            found: dict[str, Vector] = {}
            for text in dict.fromkeys(texts):
                if (kept := self._kept(text)) is not None:
                    found[text] = kept
            new = [text for text in dict.fromkeys(texts) if text not in found]
            for text, vector in zip(new, self._encoded(new) if new else [], strict=True):
                found[text] = vector
                self._keep(text, vector)
        return [found[text] for text in texts]

    def _encoded(self, texts: Sequence[str]) -> list[Vector]:
        if self._encoder is None:
            self._encoder = _load(self.model, self._device)
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


def _load(model: str, device: str | None) -> Any:
    library = importlib.import_module(_LIBRARY)
    try:
        return library.SentenceTransformer(model, device=device)
    except EnvserverError:
        raise
    except (OSError, ValueError) as error:
        words = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise NotFoundError(
            f"The embedding model {model!r} cannot be loaded: {words}",
            hint="Name a folder, or a model on the hub such as BAAI/bge-small-en-v1.5.",
        ) from error


class Traces:
    """Traces, numbered from 1 for each model and label, in order of arrival."""

    name = "traces"
    suffix = ".json"

    def __init__(self, options: Options) -> None:
        self._options = options
        self._embedder = _embedder(options)
        self._numbers: Counter[tuple[str, str]] = Counter()

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        for rollout in kept:
            auto = self._options.label == "auto"
            label = label_of(rollout) if auto else self._options.label
            model = rollout.model or "model"
            self._numbers[model, label] += 1
            number = self._numbers[model, label]
            trace = trace_of(rollout, label=label, number=number)
            if self._embedder is not None:
                trace = embed_steps(trace, self._embedder)
            if self._options.jsonl:
                yield trace
            else:
                path = f"{file_name(model)}/{file_name(label)}/run_{number:03d}.json"
                yield NamedFile(path, orjson.dumps(trace, option=_INDENTED))


def _embedder(options: Options) -> Embedder | None:
    return Embedder(options.embed, cache=options.embed_cache) if options.embed else None

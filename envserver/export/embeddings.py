"""Embeds the steps of traces with sentence-transformers models, with a cache.

In: a trace. Out: the same with an `embedding` (a list of floats) in each step that has text, and
`metadata.embedder_id`. The cache file of an embedding is named by the sha256 of its text and model,
so nothing is computed twice, in any run.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from envserver_records.errors import ConfigError, EnvserverError, NotFoundError
from envserver_records.extras import install_command
from envserver_records.files import replacing, storing
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Json = dict[str, Any]

BATCH = 32
_LIBRARY = "sentence_transformers"
DIGITS = 7
"""Significant digits written: float32 has no more."""


class Embedder:
    """A text embedding model; loaded at the first text that is not in the cache.

    Args:
        model: name on the hub, or folder.
        cache: folder of the vectors; None: no cache.
        device: "cpu", "cuda"; unset: as sentence-transformers chooses.
    """

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
        told = f"{self.model}\0{text}".encode("utf-8", "surrogatepass")
        name = hashlib.sha256(told).hexdigest()
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
    """Returns `trace` with an `embedding` in each step with text. Raises as `embed`."""
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

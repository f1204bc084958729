"""`--to traces`: `{model}/{label}/run_NNN.json` below the folder, or JSONL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import orjson

from .embeddings import Embedder, embed_steps
from .formats import NamedFile, Options, Row
from .stored import StoredGroup, StoredRollout
from .traces import file_name, label_of, trace_of


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


_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE

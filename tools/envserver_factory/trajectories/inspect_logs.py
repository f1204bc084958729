"""Reads logs of Inspect (`.eval`, `.json`): one document for each sample.

In: a log, read by inspect_ai. Out: for a sample that `envserver export --to inspect` wrote, the
line of its rollout, as `process` writes it; for any other, a trajectory that `convert_foreign`
understands. One sample is in memory at a time (of a `.json` log, all). A sample that cannot be read
comes with the reason, and the others still come; rollouts that were lost have no document.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from envserver.export.inspect_format import STORE, require_inspect
from envserver.export.inspect_samples import LOST, REWARD, message_of

from .document import Document

Json = dict[str, Any]

_VALUES: Final = {
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
    """Returns whether a JSON document is a log of Inspect."""
    spec = value.get("eval") if isinstance(value, dict) else None
    return isinstance(spec, dict) and "task" in spec and "status" in value


def inspect_documents(path: Path) -> Iterator[Document]:
    """Yields a document for each sample of a log.
    Raises ConfigError: inspect_ai is not installed.
    """
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
            yield Document(path, None, None, f"no log of Inspect: {_reason(error)}", size)
            return
        number += 1
        value, problem = _read(sample)
        if value is not None or problem is not None:
            yield Document(path, None, value, problem, size if number == 1 else 0, part=name)


def _samples(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields each sample with its name; for one that cannot be read the error."""
    from inspect_ai._util.async_zip import AsyncZipReader
    from inspect_ai._util.asyncfiles import AsyncFilesystem
    from inspect_ai.log import (
        read_eval_log,
        read_eval_log_sample_async,
        read_eval_log_sample_summaries,
    )

    if path.suffix != ".eval":
        for sample in read_eval_log(path, format="json", resolve_attachments=True).samples or ():
            yield f"sample {sample.id}, epoch {sample.epoch}", sample
        return
    summaries = read_eval_log_sample_summaries(path, format="eval")
    with asyncio.Runner() as runner:
        # One reader for all samples: each new one would read the file's directory again.
        reader = AsyncZipReader(AsyncFilesystem(), str(path))
        for summary in summaries:
            reading = read_eval_log_sample_async(
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
        return None, f"cannot be read: {_reason(sample)}"
    ours = sample.store.get(STORE)
    try:
        if ours is not None:
            return _line(ours, [message_of(one) for one in sample.messages]), None
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        return None, f"its store is not that of a rollout: {_reason(error)}"
    if sample.error is not None:
        lost = LOST in sample.metadata
        return None, None if lost else f"ended with an error: {sample.error.message[:200]}"
    return _foreign(sample), None


def _line(ours: Json, messages: list[Json]) -> Json:
    (told,) = ours["envserver"]["rollouts"]
    told = {**told, "messages": messages}
    return {**ours, "envserver": {**ours["envserver"], "rollouts": [told]}}


def _foreign(sample: Any) -> Json:
    asked = sample.input if isinstance(sample.input, str) else None
    name = str(sample.id) if sample.epoch == 1 else f"{sample.id}-epoch-{sample.epoch}"
    document = {
        "task_id": name,
        "question": asked,
        "messages": [message_of(one) for one in sample.messages],
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
    """Returns the numbers of a sample's scores; `total` where one of them is the reward."""
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


def _seconds(moment: str | None) -> float | None:
    return datetime.fromisoformat(moment).timestamp() if moment else None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]

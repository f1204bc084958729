"""The trace of one run of the text protocol: its content as data, and its path."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

from .protocol import ProtocolRun


def trace(
    run: ProtocolRun,
    *,
    scenario: str,
    model: str,
    hf_id: str = "",
    backend: str = "",
    label: str,
    number: int,
    prompt: str,
    seed: int,
    started: float,
    ended: float | None = None,
) -> dict[str, Any]:
    """Returns the trace of `run`.

    Args:
        scenario: a short name of the task.
        label: the label of the prompt.
        number: the run's number among those of the same model and label.
        prompt: the task as sent to the model.
        started, ended: `time.time()`; unset: now.
    """
    begin = datetime.fromtimestamp(started, UTC)
    seconds = (time.time() if ended is None else ended) - started
    types = [step["type"] for step in run.steps]
    return {
        "run_id": _name(f"{scenario}_{model}_{label}_{number:03d}_{begin:%Y%m%d_%H%M%S}"),
        "scenario": scenario,
        "model": {"name": model, "hf_id": hf_id, "backend": backend},
        "label": label,
        "timestamp": begin.isoformat(),
        "prompt": prompt,
        "seed": seed,
        "steps": run.steps,
        "outcome": {
            "num_steps": len(types),
            "elapsed_seconds": round(seconds, 3),
            "completed": types[-1:] == ["final"],
            "error": "error" in types,
        },
    }


def trace_path(trace: dict[str, Any], number: int) -> str:
    """Returns the trace's path below the folder of all traces."""
    return f"{_name(trace['model']['name'])}/{_name(trace['label'])}/run_{number:03d}.json"


def _name(text: str) -> str:
    """`text` as a name of a file: a model may be called "maker/model"."""
    return re.sub(r"[^\w.-]|^\.+", "_", text)

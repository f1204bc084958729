"""Records in `state.json` what was done, so that a training can be interrupted and continued.

What always holds: the file is replaced as a whole; `run_id` is chosen before anything is sent, and
labels the job, so that a launch whose answer was lost is found again.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from envserver_records import ConflictError, InputError
from envserver_records.files import replace_file

_NAME: Final = "state.json"


@dataclass
class TuningState:
    """The progress of a training.

    Args:
        settings: the settings that define it; a later command must not change them.
        files: sha256 of the prepared data, by name.
        counts: how many rows became examples, and why others were left out.
        uploaded: URL by name.
        job: resource name; "" before the launch.
    """

    run_id: str
    settings: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    uploaded: dict[str, str] = field(default_factory=dict)
    job: str = ""


def open_state(folder: Path, settings: dict[str, Any]) -> TuningState:
    """Returns the folder's state, or a new one.

    Raises:
        ConflictError: it belongs to a training with other settings.
        InputError: it cannot be read.
    """
    path = folder / _NAME
    if not path.is_file():
        return TuningState(uuid.uuid4().hex[:16], settings)
    try:
        state = TuningState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    changed = sorted(
        name
        for name in settings.keys() | state.settings.keys()
        if settings.get(name) != state.settings.get(name)
    )
    if changed:
        raise ConflictError(
            f"{folder} belongs to a training with another {', '.join(changed)}.",
            hint="Use the same settings to continue, or another --output.",
        )
    return state


def save(folder: Path, state: TuningState) -> None:
    write_json(folder / _NAME, asdict(state))


def write_json(path: Path, value: Any) -> None:
    """Replaces a file with JSON; it is on disk on return."""
    replace_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

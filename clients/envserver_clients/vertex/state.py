"""What was done, in `state.json`: a training can be left at any moment and gone on with.

What holds: the file is replaced whole; `run_id` is chosen before anything is sent, and is a label
of the job, by which a launch whose answer was lost is found again.
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
class State:
    """A training so far.

    Args:
        settings: those that make it what it is; another command may not change them.
        files: sha256 of the prepared data, by name.
        counts: what became of the rows.
        uploaded: URL by name.
        job: resource name; "" before the launch.
    """

    run_id: str
    settings: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    uploaded: dict[str, str] = field(default_factory=dict)
    job: str = ""


def open_state(folder: Path, settings: dict[str, Any]) -> State:
    """That of the folder, or a new one.

    Raises:
        ConflictError: it is of a training with other settings.
        InputError: it cannot be read.
    """
    path = folder / _NAME
    if not path.is_file():
        return State(uuid.uuid4().hex[:16], settings)
    try:
        state = State(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    changed = sorted(
        name
        for name in settings.keys() | state.settings.keys()
        if settings.get(name) != state.settings.get(name)
    )
    if changed:
        raise ConflictError(
            f"{folder} is of a training with another {', '.join(changed)}.",
            hint="Give it the same settings to go on, or name another --output.",
        )
    return state


def save(folder: Path, state: State) -> None:
    write_json(folder / _NAME, asdict(state))


def write_json(path: Path, value: Any) -> None:
    """Replaces a file as a whole, on disk when this returns."""
    replace_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

"""What an exception of a tool means, and where it was raised."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from envserver_records.errors import EnvserverError

from .calling import ToolError

_LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)


def is_bug(error: Exception) -> bool:
    """Returns whether a tool's exception is a bug of its author: it has no other meaning here."""
    return not isinstance(error, EnvserverError | ToolError | OSError)


def place_of(error: BaseException) -> str:
    """Returns the innermost place outside of libraries (else the innermost). The file's name alone:
    messages are kept with rollouts, without the user's folders."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [one for one in frames if not one[0].f_code.co_filename.startswith(_LIBRARIES)]
    if not frames:
        return ""
    frame, line = (own or frames)[-1]
    name = Path(frame.f_code.co_filename).name
    return f"({name}:{line}, in {frame.f_code.co_qualname})."

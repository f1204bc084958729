"""Renamed settings. The old name is still accepted, with a warning that gives the new name.

In: a dotted path as given (flag, YAML key or environment variable). Out: the current path. New
names that a command does not have are ignored, so one table serves every command. The help shows
only new names.
"""

from __future__ import annotations

from collections.abc import Collection

RENAMED: dict[str, str] = {
    "api_key": "openai.api_key",
    "out_dir": "out",
}
"""Old path -> new path. A path of a section renames everything in it."""


def current_path(path: str, known: Collection[str]) -> str:
    """Returns the current name of `path`; `path` itself if it was not renamed.

    Args:
        path: dotted path of a setting.
        known: the existing paths; an existing name is never treated as an old name.
    """
    if path in known:
        return path
    for old, new in RENAMED.items():
        if path == old or path.startswith(f"{old}."):
            renamed = new + path[len(old) :]
            if renamed in known:
                return renamed
    return path


def with_old_names(known: Collection[str]) -> set[str]:
    """Returns `known` with the old names of its paths added."""
    old_names = {
        old + path[len(new) :]
        for path in known
        for old, new in RENAMED.items()
        if path == new or path.startswith(f"{new}.")
    }
    return {*known, *old_names}

"""Settings that got a new name; the old one is still accepted, with a line that says the new one.

In: a dotted path as somebody wrote it (flag, YAML key or environment variable). Out: the path to
use now. A new name that the command does not have changes nothing, so one table serves every
command. The help shows only new names.
"""

from __future__ import annotations

from collections.abc import Collection

RENAMED: dict[str, str] = {
    "out_dir": "out",
    "output": "out",
    "sandbox.wall": "sandbox.backend",
}
"""Old path -> new path. A path of a section renames everything in it."""


def current_path(path: str, known: Collection[str]) -> str:
    """The name that `path` has now; `path` itself where it was not renamed.

    Args:
        path: dotted path of a setting.
        known: the paths that exist; a name that exists is never read as an old one.
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
    """`known` and the old names of its paths."""
    old_names = {
        old + path[len(new) :]
        for path in known
        for old, new in RENAMED.items()
        if path == new or path.startswith(f"{new}.")
    }
    return {*known, *old_names}

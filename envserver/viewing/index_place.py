"""Where the index of what is looked at lies.

What holds: a file that another program made is never overwritten. The index lies beside what it is
of, or in the user's cache where that cannot be written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from envserver_records.files import storing, user_folder

APPLICATION: Final = 0x656E7649
"""Marks a SQLite file as an index ("envI")."""
_SQLITE: Final = b"SQLite format 3\0"


def index_path(places: Sequence[str]) -> Path:
    """Returns where the index of these places is, or is to be made.

    Raises:
        ConfigError, StoreError: the user has no cache.
    """
    path = Path(places[0])
    if len(places) == 1 and (path.is_file() or path.is_dir()):
        beside = path / ".view.index" if path.is_dir() else path.with_name(f"{path.name}.index")
        if is_index(beside) or (not _exists(beside) and os.access(beside.parent, os.W_OK)):
            return beside
    named = "\n".join(os.path.abspath(one) for one in places)  # noqa: PTH100 - globs, too
    digest = hashlib.blake2b(named.encode(errors="surrogateescape"), digest_size=12).hexdigest()
    folder = user_folder("XDG_CACHE_HOME", ".cache") / "envserver" / "view"
    with storing(folder, "XDG_CACHE_HOME names another place."):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"{digest}.index"


def is_index(path: Path) -> bool:
    """Returns whether `path` is an index, or an empty file, that can be written."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(100)
    except OSError:
        return False
    mark = int.from_bytes(head[68:72], "big")
    is_ours = head.startswith(_SQLITE) and mark == APPLICATION
    return (is_ours or not head) and os.access(path, os.W_OK)


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()

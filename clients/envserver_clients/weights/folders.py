"""Saves weights in folders from which engines load them, such as `version-17`.

In: a function that writes a version's files. Out: the folder's path. What always holds: a folder of
this name is complete and on disk (written under another name, synced, renamed). A saved folder is
never written again: saving the version again makes `version-17.1`, because an engine may still read
the first folder and caches what it computed by its path.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from envserver_records import InputError
from envserver_records.files import sync_path, sync_tree

from .errors import WeightsNotSaved

log = logging.getLogger(__name__)

Save = Callable[[Path], None]
_NAME: Final = re.compile(r"version-(\d+)(?:\.(\d+))?")
_UNFINISHED: Final = ".unfinished-"
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_FULL_WORDS: Final = ("No space left", "os error 28", "Disk quota exceeded")


class WeightFolders:
    """Manages the versions below `folder`, which is made when needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def save(self, version: int, save: Save, wanted: Collection[str]) -> Path:
        """Saves a version with `save`; returns its folder.

        Args:
            wanted: patterns of files; each must match a file afterwards.

        Raises:
            WeightsNotSaved: the disk is full, or `save` raised an error; nothing remains.
            InputError: `save` did not write the files that engines need.
        """
        unfinished = self._folder / f"{_UNFINISHED}{version}-{os.getpid()}"
        try:
            self._sweep()
            unfinished.mkdir(parents=True)
            save(unfinished)
            _must_hold(unfinished, wanted)
            sync_tree(unfinished)
            final = self._folder / self._free_name(version)
            unfinished.rename(final)
            sync_path(self._folder)
        except InputError:
            self._remove(unfinished)
            raise
        except Exception as error:  # `save` is the caller's and may raise anything
            self._remove(unfinished)
            raise _not_saved(version, self._folder, error) from error
        return final

    def versions(self) -> dict[int, list[Path]]:
        """Returns the folders of each version, the oldest first."""
        found: dict[int, list[tuple[int, Path]]] = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if named := _NAME.fullmatch(path.name):
                found.setdefault(int(named[1]), []).append((int(named[2] or 0), path))
        return {version: [path for _, path in sorted(found[version])] for version in sorted(found)}

    def keep(self, versions: Collection[int]) -> None:
        """Removes all other versions; failed removals are repeated the next time."""
        for version, paths in self.versions().items():
            if version not in versions:
                for path in paths:
                    # Rename before removing, so that no partial version is visible.
                    going = path.with_name(f"{_UNFINISHED}{path.name}")
                    path.rename(going)
                    self._remove(going)

    def _free_name(self, version: int) -> str:
        taken = self.versions().get(version)
        if not taken:
            return f"version-{version}"
        last = _NAME.fullmatch(taken[-1].name)
        assert last is not None
        return f"version-{version}.{int(last[2] or 0) + 1}"

    def _sweep(self) -> None:
        """Removes what a trainer left that was killed while saving."""
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            self._remove(path)

    def _remove(self, folder: Path) -> None:
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s could not be removed: %s", folder, error)


def _must_hold(folder: Path, wanted: Collection[str]) -> None:
    missing = [pattern for pattern in wanted if not any(folder.glob(pattern))]
    if missing:
        raise InputError(
            f"The saved folder has no {' and no '.join(missing)}.",
            hint="Save a whole model (for LoRA an adapter), as save_pretrained does.",
        )


def _not_saved(version: int, folder: Path, error: Exception) -> WeightsNotSaved:
    words = str(error)
    full = getattr(error, "errno", None) in _FULL or any(part in words for part in _FULL_WORDS)
    hint = (
        "The disk is full: make room or keep fewer versions, then publish again."
        if full
        else "No engine was changed: publish it again."
    )
    return WeightsNotSaved(
        f"Version {version} could not be saved in {folder}: {type(error).__name__}: {words}.",
        hint=hint,
        folder=str(folder),
        full=full,
    )

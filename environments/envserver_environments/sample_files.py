"""Sample files of an environment's inputs, for `envserver sample`: copies of its built-in data."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path


def copied(data: Path, folder: Path, settings: Mapping[str, str]) -> dict[str, Path]:
    """Copies files and folders of an environment's `data` to `folder`.

    Args:
        settings: the setting that reads each, with its path in `data` ("": all of `data`).

    Returns:
        The settings, with the paths of the copies.
    """
    copies = {name: folder / path for name, path in settings.items()}
    for name, path in settings.items():
        source = data / path
        if source.is_dir():
            shutil.copytree(source, copies[name], dirs_exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copies[name])
    return copies

"""Copies files to and from a bucket at any URL that fsspec supports (gs:// with gcsfs)."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from envserver_records import ConfigError, EnvserverError, NotFoundError
from envserver_records.extras import CLIENTS, install_command


def upload(path: Path, url: str) -> None:
    """Uploads a file and checks the size of what arrived.

    Raises:
        ConfigError: no installed library supports such URLs.
        EnvserverError: the upload failed.
    """
    system, place = _place(url)
    try:
        system.makedirs(system._parent(place), exist_ok=True)
        system.put_file(str(path), place)
        size = system.info(place)["size"]
    except Exception as error:  # each kind of storage has its own errors
        raise _failed("uploaded to", url, error) from error
    if size != path.stat().st_size:
        raise EnvserverError(f"{url} has {size} bytes, {path.name} {path.stat().st_size}.")


def download(url: str, folder: Path) -> list[str]:
    """Downloads all files below a URL; `folder` appears when it is complete.

    Returns:
        The files' names, relative to the folder.

    Raises:
        NotFoundError: there are no files.
        EnvserverError: the download failed.
    """
    system, place = _place(url)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as name:
        unfinished = Path(name) / "files"
        unfinished.mkdir()
        try:
            found = sorted(system.find(place))
            for file in found:
                target = unfinished / _below(place, file)
                target.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(file, str(target))
        except Exception as error:  # as above
            raise _failed("fetched from", url, error) from error
        if not found:
            raise NotFoundError(f"There is nothing at {url}.")
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    return [_below(place, file) for file in found]


def _below(place: str, file: str) -> str:
    """Returns the file's name relative to `place`."""
    name = file.removeprefix(place).lstrip("/")
    if ".." in Path(name).parts:
        raise EnvserverError(f"{file} is not below {place}.")
    return name or Path(file).name


def _place(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path there."""
    try:
        system, place = importlib.import_module("fsspec.core").url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be used from here: {error}.",
            hint=install_command("vertex", CLIENTS),
        ) from error
    return system, str(place)


def _failed(what: str, url: str, error: Exception) -> EnvserverError:
    return EnvserverError(
        f"Nothing could be {what} {url}: {type(error).__name__}: {error}.",
        hint="Does the bucket exist, and may these credentials use it? Then run the command again.",
    )

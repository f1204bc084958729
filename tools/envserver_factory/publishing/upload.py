"""Uploads a finished folder of data to another folder, a bucket, or the hub.

Targets: a path; any URL that fsspec knows (`gs://bucket/prefix`, `s3://...`, `memory://...`); a
data set on the hub (`hf://datasets/owner/name`, or with a folder after it), in one commit. The file
that describes the folder goes last: where it is, everything is. The hub library handles the token
(HF_TOKEN, or the one of `hf auth login`); it is never read, written or shown here.
"""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from envserver_records.errors import ConfigError, StoreError
from envserver_records.extras import install_command
from envserver_records.files import replacing_path, storing

HUB = "hf://"
_LAST = ("SUMMARY.json", "summary.json")
OnProgress = Callable[[str], None]
"""Called with the address of each uploaded file."""


def upload(
    folder: Path, target: str, *, on_progress: OnProgress = lambda address: None
) -> list[str]:
    """Copies all files of `folder` to `target`; files of the same names are replaced.

    Returns:
        The addresses of the files.
    """
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()),
        key=lambda path: (path.name in _LAST, str(path)),
    )
    if target.startswith(HUB):
        addresses = _to_hub(folder, files, target)
        for address in addresses:
            on_progress(address)
        return addresses
    if "://" not in target:
        return _to_folder(folder, files, Path(target), on_progress)
    return _to_url(folder, files, target, on_progress)


def check_target(target: str) -> None:
    """Checks a target."""
    if target.startswith(HUB):
        _data_set(target)
        _library("huggingface_hub", target)
    elif "://" in target:
        _file_system(target)


def _to_folder(folder: Path, files: list[Path], target: Path, on_progress: OnProgress) -> list[str]:
    if target.exists() and target.resolve() == folder.resolve():
        raise ConfigError(f"{target} is where the data was written.", hint="Leave --upload out.")
    addresses = []
    with storing(target):
        for path in files:
            place = target / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing_path(place, sync=False) as partial:
                shutil.copyfile(path, partial)
            addresses.append(str(place))
            on_progress(addresses[-1])
    return addresses


def _to_url(folder: Path, files: list[Path], target: str, on_progress: OnProgress) -> list[str]:
    system, root = _file_system(target)
    addresses = []
    for path in files:
        place = "/".join([root.rstrip("/"), *path.relative_to(folder).parts])
        try:
            system.makedirs(place.rpartition("/")[0], exist_ok=True)
            system.put_file(str(path), place)
        except Exception as error:
            raise _refused(target, error) from error
        addresses.append(str(system.unstrip_protocol(place)))
        on_progress(addresses[-1])
    return addresses


def _file_system(target: str) -> tuple[Any, str]:
    fsspec = _library("fsspec.core", target)
    try:
        system, root = fsspec.url_to_fs(target)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{target} cannot be used: {error}") from error
    return system, root


def _to_hub(folder: Path, files: list[Path], target: str) -> list[str]:
    name, below = _data_set(target)
    api = _library("huggingface_hub", target).HfApi()
    try:
        api.create_repo(name, repo_type="dataset", private=True, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            repo_type="dataset",
            folder_path=str(folder),
            path_in_repo=below or None,
            commit_message="Data written by envserver",
        )
    except Exception as error:
        raise _refused(target, error) from error
    root = f"{HUB}datasets/{name}" + (f"/{below}" if below else "")
    return [f"{root}/{path.relative_to(folder).as_posix()}" for path in files]


def _data_set(target: str) -> tuple[str, str]:
    parts = target.removeprefix(HUB).strip("/").split("/")
    if parts[0] != "datasets" or len(parts) < 3:
        raise ConfigError(f"{target} is not a data set.", hint="hf://datasets/OWNER/NAME[/FOLDER]")
    return "/".join(parts[1:3]), "/".join(parts[3:])


def _library(name: str, target: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise ConfigError(
            f"Uploading to {target} needs {library}, which cannot be imported: {error}.",
            hint=install_command("data"),
        ) from error


def _refused(target: str, error: Exception) -> StoreError:
    reason = " ".join(str(error).split())[:300]
    return StoreError(f"{target} cannot be written: {type(error).__name__}: {reason}")


_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_name(name: str) -> None:
    """Checks the name of a data set."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--push_to_hub: {name!r} is not a name of a data set.", hint="Write OWNER/NAME."
        )
    check_target(_target(name))


def push(folder: Path, name: str) -> str:
    """Uploads `folder` in one commit; a missing data set is created as private.

    Returns:
        Its address.
    """
    upload(folder, _target(name))
    return _target(name)


def _target(name: str) -> str:
    return f"{HUB}datasets/{name}"

"""Pushes a finished export to the Hugging Face hub as a data set.

The hub library handles the token (HF_TOKEN, or the one of `hf auth login`); it is never read,
written or shown here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from envserver_records.errors import ConfigError

from .upload import HUB, check_target, upload

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_name(name: str) -> None:
    """Checks the name of a data set.
    Raises ConfigError: `name` is invalid, or huggingface_hub is not installed.
    """
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

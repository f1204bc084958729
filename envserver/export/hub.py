"""A finished export, pushed to the Hugging Face hub as a data set.

The token is the hub library's own affair: HF_TOKEN or what `hf auth login` kept; it is read,
written and shown nowhere here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from envserver_records.errors import ConfigError

from .sft_building.upload import HUB, check_target, upload

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_name(name: str) -> None:
    """
    Raises:
        ConfigError: `name` is none of a data set, or huggingface_hub is not installed.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--push_to_hub: {name!r} is no name of a data set.", hint="Write OWNER/NAME."
        )
    check_target(_target(name))


def push(folder: Path, name: str) -> str:
    """Uploads `folder` in one commit; a data set that is not there is made, for its owner alone.

    Returns:
        Its address.

    Raises:
        StoreError: the hub refused, or could not be reached; `folder` stays as it is.
    """
    upload(folder, _target(name))
    return _target(name)


def _target(name: str) -> str:
    return f"{HUB}datasets/{name}"

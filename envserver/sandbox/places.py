"""Folders for temporary files, and for sockets: TMPDIR, unless that is too long for their names."""

from __future__ import annotations

import os
import tempfile

from envserver_records.errors import ConfigError

_LONGEST = 70
"""Bytes of a folder in which a socket may be made in a folder of its own: its whole path has at
most 107 (Linux, unix(7)), and 32 of these are Python's own `/pymp-.../listener-...`."""


def temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no folder for temporary files: {error.strerror}.",
            hint="Set TMPDIR to a folder that can be written to and has space left.",
        ) from None


def folder_for_sockets() -> str:
    """`/tmp` where TMPDIR's path is too long, as on clusters that name it after a job."""
    usual = temporary_folder()
    if len(os.fsencode(usual)) <= _LONGEST:
        return usual
    if not os.access("/tmp", os.W_OK | os.X_OK):
        raise ConfigError(
            f"TMPDIR is too long for sockets, and /tmp cannot be written to: {usual}",
            hint=f"Set TMPDIR to a folder whose path has at most {_LONGEST} bytes.",
        )
    return "/tmp"

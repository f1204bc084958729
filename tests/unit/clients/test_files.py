"""Files and folders are replaced as a whole, or stay as they were."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from envserver_records.errors import StoreError, StoreFull
from envserver_records.files import (
    PARTIAL_FILES,
    replace_file,
    replace_folder,
    replacing,
    replacing_path,
    storing,
)


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / ("n" * 250)
    for data in ("größer", b"\xff"):
        replace_file(path, data, sync=sync, mode=0o600)

    assert path.read_bytes() == b"\xff"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"half")
        raise KeyError
    with pytest.raises(KeyError), replacing_path(path) as partial:
        partial.write_text("half")
        raise KeyError

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_process_leaves_only_what_the_pattern_finds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = """
import os, pathlib, signal, sys
from envserver_records.files import replacing
with replacing(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False)

    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(PARTIAL_FILES)) == list(tmp_path.iterdir())


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    made, place, aside = (tmp_path / name for name in ("made", "place", "aside"))
    for folder in (made, place):
        folder.mkdir()
        (folder / "name").write_text(folder.name)

    replace_folder(made, place, aside)

    assert (place / "name").read_text() == "made"
    assert (aside / "name").read_text() == "place"


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (1, StoreError)]
)
def test_errors_of_the_file_system_become_ours(number: int, kind: type[StoreError]) -> None:
    message = r"^a/b cannot be written: .*\. Make room\.$"
    with pytest.raises(kind, match=message) as caught, storing(Path("a/b"), hint="Make room."):
        raise OSError(number, os.strerror(number))

    assert type(caught.value) is kind

"""The file that a run appends groups to, and how it replaces an old one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from envserver_records.errors import ConfigError
from support.commands import read_jsonl

from envserver.export.output_file import OutputFile, lock, open_appending


def news(path: Path) -> list[int]:
    """What was appended; the chain of lines is tested in unit/running/test_provenance.py."""
    return [line["new"] for line in read_jsonl(path)]


def test_the_first_line_replaces_the_old_content_and_later_lines_are_appended(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old 1\nold 2\n")
    with open_appending(path) as old, contextlib.closing(OutputFile(path, old, replaces=True)) as f:
        lock(old, path)
        assert path.read_text() == "old 1\nold 2\n"
        f.append(b'{"new":1}\n')
        assert news(path) == [1]
        f.append(b'{"new":2}\n')
        with open_appending(path) as other, pytest.raises(ConfigError, match="Another process"):
            lock(other, path)
    assert news(path) == [1, 2]


def test_a_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    real.write_text("old\n")
    link.symlink_to(real)
    with open_appending(link) as old, contextlib.closing(OutputFile(link, old, replaces=True)) as f:
        f.append(b'{"new":1}\n')
    assert link.is_symlink()
    assert news(real) == [1]


@pytest.mark.parametrize("name", ["/dev/full", "pipe"])
def test_what_cannot_be_read_again_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is a device or a pipe"):
        open_appending(tmp_path / name)

"""What both sides of the wire share: backoff, cleaning, files, framing, errors, hints at extras."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from envserver_records import errors, extras
from envserver_records.backoff import Backoff
from envserver_records.cleaning import clean
from envserver_records.extras import CLIENTS, install_command, missing_module_hint
from envserver_records.files import PARTIAL_FILES, replace_file, replacing, replacing_path
from envserver_records.framing import FrameReader, frame, frame_header, receive_frame
from envserver_records.http_errors import MODEL, SANDBOX, SERVICE, ErrorReader
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples

many = settings(max_examples=examples(100), deadline=None)

# Pauses between tries


def test_pauses_double_up_to_the_maximum_and_the_random_number_spreads_them() -> None:
    backoff = Backoff(first_seconds=0.5, max_seconds=3.0)
    assert [backoff.seconds(failures) for failures in range(6)] == [0, 0.5, 1, 2, 3, 3]
    backoff = Backoff(first_seconds=4.0, jitter=(0.5, 1.0))
    assert [backoff.seconds(1, draw) for draw in (0.0, 0.5, 1.0)] == pytest.approx([2, 3, 4])


@many
@given(failures=st.integers(1, 10**9), draw=st.floats(0, 1))
def test_no_pause_leaves_its_bounds(failures: int, draw: float) -> None:
    backoff = Backoff(first_seconds=0.2, max_seconds=10.0, jitter=(0.5, 1.5))
    assert 0.1 <= backoff.seconds(failures, draw) <= 10.0


# Whatever a rollout returns can be stored, sent and pickled once it is cleaned.

ANY_TEXT = st.text(st.characters(exclude_categories=[]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT,
    lambda part: st.lists(part) | st.dictionaries(ANY_TEXT, part),
)


@many
@given(VALUES)
def test_a_cleaned_value_can_be_written(value: Any) -> None:
    assert b"\\u0000" not in orjson.dumps(clean(value).value)
    assert clean(clean(value).value) == (clean(value).value, frozenset())


# Files and folders are replaced as a whole, or stay as they were.


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
    code = """
import os, pathlib, signal, sys
from envserver_records.files import replacing
with replacing(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=False)
    assert ended.returncode == -signal.SIGKILL
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left == list(tmp_path.glob(PARTIAL_FILES))


# Length-prefixed frames are whole however a stream is cut, and bounded.


@many
@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 400))
def test_bodies_come_out_however_the_stream_is_cut(bodies: list[bytes], step: int) -> None:
    data = b"".join(map(frame, bodies))
    reader = FrameReader(300)
    pieces = (data[start : start + step] for start in range(0, len(data), step))
    assert [body for piece in pieces for body in reader.feed(piece)] == bodies


def test_a_socket_gives_whole_frames_and_one_that_is_too_large_is_refused_at_its_length() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(frame(b"first") + frame(b"") + frame_header(5) + b"cut")
        one.shutdown(socket.SHUT_WR)
        assert [receive_frame(other, 5), receive_frame(other, 5)] == [b"first", b""]
        with pytest.raises(OSError, match="gone"):
            receive_frame(other, 5)
    with pytest.raises(ValueError, match="larger than 10"):
        list(FrameReader(10).feed(frame_header(11)))


# Failed HTTP answers of the server become the errors that it raised.


@pytest.mark.parametrize(
    ("reader", "status", "problem", "kind"),
    [
        (MODEL, 400, {"code": "engine_refused"}, "EngineRefused"),
        (MODEL, 422, {"code": "unknown"}, "AgentError"),
        (MODEL, 502, None, "EngineGarbage"),
        (SANDBOX, 503, {"code": "sandbox_unavailable"}, "SandboxUnavailable"),
        (SANDBOX, 409, {}, "SandboxLost"),
        (SANDBOX, 400, {}, "InputError"),
        (SERVICE, 500, {}, "ServiceError"),
        (SERVICE, 422, {}, "InputError"),
        (SERVICE, 422, None, "ServiceError"),
    ],
)
def test_the_code_decides_then_the_status(
    reader: ErrorReader, status: int, problem: dict[str, str] | None, kind: str
) -> None:
    body = json.dumps({"error": {"message": "why", **problem}}) if problem is not None else "why"
    error = reader.read(status, body.encode())
    assert type(error) is getattr(errors, kind)
    assert "why" in error.message


# The command that installs an extra fits the way in which the package was installed.


class Installed:
    requires = ("msgspec>=0.18", "smol_agents>=1; extra == 'gaia'", "b; extra == 'all'")

    def __init__(self, origin: dict[str, object] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        return None if self._origin is None else json.dumps(self._origin)


def test_the_command_fits_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "my checkout"
    (root / "clients").mkdir(parents=True)
    monkeypatch.chdir(root)
    monkeypatch.setattr(extras, "distribution", lambda project: Installed(None))
    assert install_command("gaia") == "pip install 'envserver[gaia]'"
    assert install_command("train", CLIENTS) == "pip install 'envserver-clients[train]'"
    # A module of an extra is known.
    assert missing_module_hint("smol_agents.models") == "pip install 'envserver[gaia]' installs it."
    assert "pip" not in missing_module_hint("smol") + missing_module_hint("helpers")
    origin: dict[str, object] = {"url": root.as_uri(), "dir_info": {"editable": True}}
    monkeypatch.setattr(extras, "distribution", lambda project: Installed(origin))
    assert install_command("gaia").endswith("-e '.[gaia]'")

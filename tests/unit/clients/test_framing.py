"""Length-prefixed frames: whole however a stream is cut, and bounded."""

from __future__ import annotations

import socket

import pytest
from envserver_records.framing import FrameReader, frame, frame_header, receive_frame
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 400))
def test_bodies_come_out_however_the_stream_is_cut(bodies: list[bytes], step: int) -> None:
    data = b"".join(map(frame, bodies))
    reader = FrameReader(300)

    pieces = (data[start : start + step] for start in range(0, len(data), step))
    assert [body for piece in pieces for body in reader.feed(piece)] == bodies


def test_a_frame_that_is_too_large_is_refused_at_its_length() -> None:
    with pytest.raises(ValueError, match="larger than 10"):
        list(FrameReader(10).feed(frame_header(11)))


def test_a_socket_gives_one_frame_after_the_other() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(frame(b"first") + frame(b"") + frame_header(5) + b"cut")
        one.shutdown(socket.SHUT_WR)

        assert receive_frame(other, 5) == b"first"
        assert receive_frame(other, 5) == b""
        with pytest.raises(OSError, match="gone"):
            receive_frame(other, 5)

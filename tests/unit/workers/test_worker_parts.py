"""The pure parts of workers: frames, limited output, and the blame for a death."""

from __future__ import annotations

import secrets
import signal

from envserver_records.errors import WorkerError, WorkerGarbage, WorkerHung
from hypothesis import given
from hypothesis import strategies as st

from envserver.telemetry.log_budget import BURST_BYTES, BYTES_PER_SECOND
from envserver.workers.deaths import KillReason, ProcessEnd, errors_by_rollout
from envserver.workers.frames import FrameReader, encode
from envserver.workers.output import TAIL_BYTES, OutputLimiter


@given(st.lists(st.lists(st.text(), min_size=1), max_size=5), st.integers(1, 7))
def test_frames_survive_any_cut(frames: list[list[str]], step: int) -> None:
    data = b"".join(encode(*frame) for frame in frames)
    reader = FrameReader()
    pieces = (data[start : start + step] for start in range(0, len(data), step))
    assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


@given(st.binary(max_size=300))
def test_what_is_no_frame_is_refused_or_waits(data: bytes) -> None:
    try:
        for frame in FrameReader().feed(data):
            assert frame and all(isinstance(part, str) for part in frame)
    except ValueError:
        return


PIECES = st.builds(
    lambda size, end: b"x" * size + end, st.integers(0, 9000), st.sampled_from([b"", b"\n"])
)


@given(st.lists(PIECES, max_size=60), st.floats(0, 2))
def test_every_byte_of_output_is_passed_on_or_counted(pieces: list[bytes], pause: float) -> None:
    lines, passed, dropped = OutputLimiter(0.0), 0, 0
    for number, piece in enumerate(pieces):
        passed += sum(len(line) for line in lines.feed(piece, number * pause))
        dropped += lines.take_dropped(number * pause)
    passed += sum(len(line) for line in lines.finish(len(pieces) * pause))
    dropped += lines.take_dropped()
    assert passed + dropped == b"".join(pieces).count(b"x")
    assert passed <= BURST_BYTES + len(pieces) * pause * BYTES_PER_SECOND
    assert lines.tail().encode() == b"".join(pieces)[-TAIL_BYTES:].strip()


def test_a_flood_is_told_once_a_second() -> None:
    lines = OutputLimiter(0.0)
    told = []
    for tick in range(300):  # three seconds of a megabyte a tick
        lines.feed(b"y" * 1_000_000 + b"\n", tick / 100)
        told.append(lines.take_dropped(tick / 100))
    assert sum(map(bool, told)) == 3
    assert sum(told) + lines.take_dropped() > 298_000_000


def test_output_holds_no_key_of_an_attempt() -> None:
    lines = OutputLimiter(0.0)
    key = secrets.token_urlsafe(24)
    passed = lines.feed(f"HTTP Request: POST http://127.0.0.1:1/r/{key}/v1/models\n".encode(), 0.0)
    assert passed == ["HTTP Request: POST http://127.0.0.1:1/r/***/v1/models"]
    assert key not in lines.tail()


@given(
    st.sets(st.text(min_size=1), max_size=6),
    st.sampled_from([None, WorkerHung, WorkerGarbage]),
    st.integers(0, 3),
    st.sampled_from([0, 3 << 8, signal.SIGKILL, signal.SIGSEGV, None]),
)
def test_a_death_blames_those_who_are_known_or_suspects_all(
    running: set[str], kind: type[WorkerError] | None, known: int, status: int | None
) -> None:
    culprits = frozenset(sorted(running)[:known]) if kind else frozenset()
    reason = KillReason(kind, "so", culprits) if kind else None
    errors = errors_by_rollout(running, ProcessEnd(status), reason)
    assert set(errors) == running
    blamed = {one for one, error in errors.items() if not error.detail.get("mate")}
    suspects = {one for one, error in errors.items() if error.detail.get("suspect")}
    if culprits:
        assert (blamed, suspects) == (culprits, set())
    elif len(running) == 1:
        assert (blamed, suspects) == (running, set())
    else:
        assert (blamed, suspects) == (set(), running)

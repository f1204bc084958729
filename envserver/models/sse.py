"""Server-sent events, as bytes that arrive cut anywhere -> the data of each event.

Follows the event-stream grammar of the HTML standard: lines end in LF, CRLF or CR, several `data`
lines are joined by LF, comments and other fields are ignored. How the bytes are cut never changes
what comes out.
"""

from __future__ import annotations

from envserver_records.errors import EngineGarbage

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseParser:
    """Feed it chunks; it gives the data of the events that are complete.

    Args:
        max_event_bytes: a longer line or event raises EngineGarbage.
    """

    def __init__(self, max_event_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._at_start = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that `chunk` completes.
        Raises EngineGarbage: a line or an event is over the limit.
        """
        # A line that has no end yet is put together only once: it may come in thousands of chunks.
        undecided = self._at_start or (bool(self._rest) and self._rest[-1].endswith(b"\r"))
        self._keep(chunk)
        if not undecided and b"\n" not in chunk and b"\r" not in chunk:
            self._check_size()
            return []
        text = b"".join(self._rest)
        if self._at_start:
            if len(text) < 3 and _BYTE_ORDER_MARK.startswith(text):
                return []
            self._at_start = False
            text = text.removeprefix(_BYTE_ORDER_MARK)
        # A CR at the very end may be the first half of a CRLF: it waits for the next chunk.
        held = b"\r" if text.endswith(b"\r") else b""
        if b"\r" in text:
            text = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest, self._rest_bytes = [], 0
        self._keep(rest + held)
        events = [event for line in lines if (event := self._line(line)) is not None]
        self._check_size()
        return events

    def close(self) -> list[bytes]:
        """The last event, when the stream ended without the empty line behind it."""
        rest = b"".join(self._rest).rstrip(b"\r")
        return [event for line in (rest, b"") if (event := self._line(line)) is not None]

    def _keep(self, rest: bytes) -> None:
        if rest:
            self._rest.append(rest)
            self._rest_bytes += len(rest)

    def _check_size(self) -> None:
        if self._rest_bytes + self._data_bytes > self._max_event_bytes:
            raise EngineGarbage(f"The engine sent an event of over {self._max_event_bytes} bytes.")

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            if not self._data:
                return None
            event = b"\n".join(self._data)
            self._data, self._data_bytes = [], 0
            return event
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value)
        return None

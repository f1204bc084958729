"""Files as programs write them that no library here writes: OLE containers, xls, msg."""

from __future__ import annotations

import struct

_SECTOR = 512
_LEAST = 4096
"""Shorter streams would live in a second system of smaller sectors."""
_FREE, _END, _TABLE = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD

Streams = dict[str, "bytes | Streams"]


def ole(streams: Streams) -> bytes:
    """A container of `streams`, each filled up with zeros; what is a dict is a folder."""
    sectors: list[bytes] = []
    chain: list[int] = []

    def put(content: bytes) -> int:
        start = len(sectors)
        count = -(-len(content) // _SECTOR)
        sectors.extend(
            content[at : at + _SECTOR].ljust(_SECTOR, b"\0")
            for at in range(0, len(content), _SECTOR)
        )
        chain.extend([*range(start + 1, start + count), _END])
        return start

    entries: list[bytes] = [b""]

    def entry(name: str, kind: int, right: int, child: int, start: int, size: int) -> bytes:
        written = name.encode("utf-16-le") + b"\0\0"
        head = written.ljust(64, b"\0") + struct.pack("<HBB", len(written), kind, 1)
        return head + struct.pack("<III", _FREE, right, child) + bytes(36) + struct.pack(
            "<IQ", start, size
        )  # fmt: skip

    def folder(inner: Streams) -> int:
        """Puts entries, each the right neighbour of the last; the first one's number."""
        last = _FREE
        for name, content in sorted(inner.items(), key=lambda item: (len(item[0]), item[0]))[::-1]:
            number = len(entries)
            entries.append(b"")
            if isinstance(content, dict):
                entries[number] = entry(name, 1, last, folder(content), 0, 0)
            else:
                whole = content.ljust(_LEAST, b"\0")
                entries[number] = entry(name, 2, last, _FREE, put(whole), len(whole))
            last = number
        return last

    entries[0] = entry("Root Entry", 5, _FREE, folder(streams), _END, 0)
    directory = put(b"".join(entries).ljust(-(-len(entries) // 4) * _SECTOR, b"\0"))
    table = len(sectors)
    numbers = [*chain, _TABLE]
    assert len(numbers) <= _SECTOR // 4, "one sector of table is all that this writes"
    sectors.append(struct.pack(f"<{len(numbers)}I", *numbers).ljust(_SECTOR, b"\xff"))
    head = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16)
    head += struct.pack("<HHHHH6xIIIIIIIII", 0x3E, 3, 0xFFFE, 9, 6, 0, 1, directory, 0, _LEAST,
                        _END, 0, _END, 0)  # fmt: skip
    head += struct.pack("<I", table)
    return head.ljust(_SECTOR, b"\xff") + b"".join(sectors)


def xls(sheet: str, rows: list[list[str | float]]) -> bytes:
    """A workbook of Excel 97 with one sheet."""

    def record(kind: int, body: bytes = b"") -> bytes:
        return struct.pack("<HH", kind, len(body)) + body

    def begin(kind: int) -> bytes:
        return record(0x809, struct.pack("<HHHHII", 0x600, kind, 0, 0, 0, 6))

    cells = b""
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            place = struct.pack("<HHH", row, column, 0)
            if isinstance(value, str):
                text = struct.pack("<HB", len(value), 1) + value.encode("utf-16-le")
                cells += record(0x204, place + text)
            else:
                cells += record(0x203, place + struct.pack("<d", value))
    name = struct.pack("<BB", len(sheet), 1) + sheet.encode("utf-16-le")
    size = len(begin(5) + record(0x85, bytes(6) + name) + record(0xA))
    head = begin(5) + record(0x85, struct.pack("<IBB", size, 0, 0) + name) + record(0xA)
    return ole({"Workbook": head + begin(16) + cells + record(0xA)})


def msg(subject: str, sender: str, body: str, attached: str) -> bytes:
    """A mail of Outlook, sent at the beginning of 2024."""

    def text(number: str) -> str:
        return f"__substg1.0_{number}001F"

    times = bytes(32) + struct.pack("<HHIQ", 0x40, 0x39, 6, 133_485_408_000_000_000)
    return ole(
        {
            "__properties_version1.0": times,
            text("0037"): subject.encode("utf-16-le"),
            text("0C1A"): sender.encode("utf-16-le"),
            text("1000"): body.encode("utf-16-le"),
            "__attach_version1.0_#00000000": {
                text("3707"): attached.encode("utf-16-le"),
                "__substg1.0_37010102": b"content",
            },
        }
    )

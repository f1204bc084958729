"""No client can break a part of the sandboxes: broken clients, a hostile in-sandbox server."""

import asyncio
import contextlib
import json
import os
import resource
import select
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from envserver_records.errors import SandboxLost
from support.process_tree import descendants
from support.sandboxes import sandboxes
from support.waiting import PATIENCE, until

from envserver import SandboxSpec
from envserver.sandbox import inside
from envserver.sandbox.backend import HostBackend
from envserver.sandbox.client import ConnectedSandbox, SandboxClient
from envserver.sandbox.wire import encode

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes() -> AsyncIterator[SandboxClient]:
    async with sandboxes(concurrent=400) as client:
        yield client


def connected(client: SandboxClient) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.connect(client._address)
    one.setblocking(False)
    return one


def hung_up(one: socket.socket) -> bool:
    poll = select.poll()
    poll.register(one, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


async def test_what_clients_send_does_not_end_the_supervisor(boxes: SandboxClient) -> None:
    nonsense = [
        b"\xff" * 100,
        b"\x93\xa2\xff\xfe\x01\x90",  # a word that is not text
        msgspec.msgpack.encode((1, 2, 3)),
        msgspec.msgpack.encode(("no such word", 1, ())),
        msgspec.msgpack.encode(("open", 2**64 - 1, ("no such\0module",))),
    ]
    async with boxes.open(SandboxSpec()) as box:
        for data in nonsense:
            with connected(boxes) as broken:
                broken.send(data)
                with contextlib.suppress(ConnectionError):  # it may have been hung up on already
                    broken.send(b"\xff")
                    while await asyncio.get_running_loop().sock_recv(broken, 65536):
                        pass  # at its end all that it sent has been read
        assert (await box.run_python("print('alive')")).ok


async def test_a_client_that_does_not_listen_holds_up_nobody(boxes: SandboxClient) -> None:
    """Its answers wait in the kernel, which usually has room for some 300."""
    asked = msgspec.msgpack.encode(("open", 1, ()))
    with connected(boxes) as deaf:
        with contextlib.suppress(OSError):  # it is hung up on
            for _ in range(360):
                await asyncio.get_running_loop().sock_sendall(deaf, asked)
        await until(lambda: hung_up(deaf) or len(descendants(os.getpid())) > 360)
        async with asyncio.timeout(PATIENCE), boxes.open(SandboxSpec()) as box:
            assert (await box.run_python("print('alive')")).ok


class Exhausted(HostBackend):
    """A room on a machine that has no descriptors left."""

    def furnish(self, disk_bytes: int, inodes: int) -> None:
        super().furnish(disk_bytes, inodes)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


async def test_a_program_the_machine_cannot_start_is_no_mistake_of_callers(tmp_path: Path) -> None:
    def room() -> Exhausted:
        seen = {"visible": [], "search_path": [], "filter": "", "variables": {}}
        return Exhausted(str(tmp_path), seen, confined=False, own_user=False)

    with served(lambda channel: inside.serve(channel, room)) as box:
        await box.set_up(SandboxSpec())
        with pytest.raises(SandboxLost):
            await box.run_python("print('alive')")
        await box.close()


ALTERNATING = [1 - 2 * (number % 2 == 0) for number in range(100_000)]
"""Lengths that would each time take the whole frame."""


def frame(text: bytes, rest: bytes = b"") -> bytes:
    return struct.pack(">II", 8 + len(text) + len(rest), len(text)) + text + rest


ANSWERS = {
    "a huge frame": struct.pack(">II", 2**32 - 1, 10),
    "nothing but text": struct.pack(">II", 90 * 2**20, 90 * 2**20 - 8) + b"[" * 4096,
    "more text than there is": struct.pack(">II", 9, 100),
    "nested lists": frame(b"[" * 200_000 + b"]" * 200_000),
    "nested objects": frame(b'[["ok",' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"],[1]]", b"x"),
    "lengths below zero": frame(json.dumps([["ok"], ALTERNATING]).encode(), bytes(10**6)),
    "bytes that are not there": frame(b'[["ok",{"$bytes":3}],[1]]', b"x"),
    "no message": frame(b"17"),
    "no result": encode("ok", {"exit": "fine"}),
    "a result that is a list": encode("ok", [1, 2, 3]),
    "no word": encode("well", 1),
    "numbers that are none": frame(b'[["ok",{"exit":NaN,"stdout":Infinity}],[]]'),
    "the end": b"",
}


@contextlib.contextmanager
def served(serve: Callable[[socket.socket], None]) -> Iterator[ConnectedSandbox]:
    """A sandbox whose server inside is `serve`, in a process of its own."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        with contextlib.suppress(OSError):
            serve(theirs)
        os._exit(0)
    theirs.close()
    try:
        yield ConnectedSandbox("namespace", ours, os.pidfd_open(pid))
    finally:
        os.waitpid(pid, 0)


def hostile(answer: bytes) -> contextlib.AbstractContextManager[ConnectedSandbox]:
    """It says just that, and ends."""

    def serve(channel: socket.socket) -> None:
        channel.recv(65536)
        channel.sendall(answer)

    return served(serve)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_a_hostile_inside_loses_its_sandbox_and_nothing_else(answer: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with hostile(answer) as box:
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(box.run_python("print(1)"), PATIENCE)
        await box.close()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 200 * 1024


async def test_more_than_was_asked_for_is_not_taken() -> None:
    with hostile(encode("ok", bytes(1000))) as box:
        with pytest.raises(SandboxLost):
            await box.read("file", max_bytes=10)
        await box.close()

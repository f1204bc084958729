"""A server in a process of its own, to be killed: `python -m support.sandbox_holder WALL MARK`.

It opens sandboxes whose programs stay, and whose names and arguments bear MARK; then it says so.
"""

from __future__ import annotations

import asyncio
import sys

from envserver import Sandboxes, SandboxSpec

from .sandboxes import sandboxes

STAY = """
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sh", [MARK, "-c", "sleep 60; exit"])
ctypes.CDLL(None).prctl(15, MARK.encode())
open("began", "w").close()
time.sleep(60)
"""


async def stay(boxes: Sandboxes, mark: str) -> None:
    async with boxes.open(SandboxSpec()) as box:
        await box.run_python(f"MARK = {mark!r}" + STAY)


async def hold(backend: str, mark: str) -> None:
    async with sandboxes(backend) as boxes:
        staying = [asyncio.create_task(stay(boxes, mark)) for _ in range(4)]
        await asyncio.sleep(1.0)
        print("running", flush=True)
        await asyncio.gather(*staying)


if __name__ == "__main__":
    asyncio.run(hold(*sys.argv[1:]))

"""A server in a process of its own, to be killed: `python -m support.sandbox_holder WALL MARK`.

It opens sandboxes whose programs stay, and whose names and arguments bear MARK; then it says so.
"""

import asyncio
import sys

from envserver import Sandboxes, SandboxLimits, SandboxSpec

from .process_tree import alive_with
from .sandboxes import sandboxes
from .waiting import until

STAY = """
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sh", [MARK, "-c", "sleep 3600; exit"])
ctypes.CDLL(None).prctl(15, MARK.encode())
open("began", "w").close()
time.sleep(3600)
"""
STAYING = SandboxSpec(limits=SandboxLimits(wall_seconds=3600.0))


async def stay(boxes: Sandboxes, mark: str) -> None:
    async with boxes.open(STAYING) as box:
        await box.run_python(f"MARK = {mark!r}" + STAY)


async def hold(backend: str, mark: str) -> None:
    async with sandboxes(backend) as boxes:
        staying = [asyncio.create_task(stay(boxes, mark)) for _ in range(4)]
        ended = asyncio.gather(*staying)
        # Each has forked once, and this process bears the mark, too.
        await until(lambda: ended.done() or len(alive_with(mark)) == 1 + 2 * len(staying))
        if not ended.done():
            print("running", flush=True)
        await ended


if __name__ == "__main__":
    asyncio.run(hold(*sys.argv[1:]))

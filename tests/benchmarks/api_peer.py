"""The trainer APIs that are measured, each as a process of its own: ours and PyPI's atroposlib."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from proxy_load import cpu_seconds
from support.commands import free_port, running, until

from envserver.store import GroupPut, open_store

ROOT = Path(__file__).parent.parent.parent
PEER_PYTHON = ROOT / ".venv-atropos" / "bin" / "python"
HOW_TO_GET_PEER = "PyPI's atroposlib is not in .venv-atropos: make atropos-peer"


class Server(NamedTuple):
    """A trainer API that answers at `url`."""

    name: str
    url: str
    pid: int

    def cpu(self) -> float:
        """CPU seconds so far, with kernel calls and all threads."""
        return cpu_seconds(self.pid)

    def memory_bytes(self) -> int:
        """What it holds of the machine's memory now, pages of files not counted."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise OSError(f"/proc/{self.pid}/status names no RssAnon")


@contextmanager
def ours(groups: Sequence[GroupPut] = (), store: str | None = None) -> Iterator[Server]:
    """`envserver run-api` over `store`, else over a SQLite store on disk that holds `groups`."""
    with _folder() as folder:
        place = store or folder / "store.db"
        if groups:
            asyncio.run(_fill(folder / "store.db", groups))
        words = ["run-api", "--port", "0", "--store", place, "--log_level", "warning"]
        with running(*words, folder=folder) as process:
            url = process.wait_for(r"(http://127\.0\.0\.1:\d+)").group(1)
            yield Server("ours", url, process.pid)


async def _fill(place: Path, groups: Sequence[GroupPut]) -> None:
    async with open_store(place) as store:
        for group in groups:
            await store.put([group])


@contextmanager
def theirs() -> Iterator[Server]:
    """The server of atroposlib, as its `run-api` starts it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["-m", "uvicorn", "atroposlib.api.server:app", "--log-level", "warning"]
    with (
        _folder() as folder,
        running(*words, "--port", port, folder=folder, program=PEER_PYTHON) as process,
    ):
        until(lambda: _answers(url), process.output, alive=process.process)
        yield Server("atroposlib", url, process.pid)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/info", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


@contextmanager
def _folder() -> Iterator[Path]:
    """On a disk, where the temporary folder is one; removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="bench-api-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""Runs the same work by us and by a peer, each in processes of its own; see `compare.py`.

CPU is that of all of them, as the kernel counted it when they had ended; memory is the largest sum
of what each held alone and its share of what they hold together (PSS), looked at twice a second.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import api_load as load
import msgspec
import orjson
from api_load import GROUP_SIZE, ROOT, Server
from support.commands import ENVSERVER, environment_variables, until
from support.process_tree import command, descendants, parents

from envserver import Isolation

HERE = Path(__file__).parent
VERIFIERS = ROOT / ".venv-verifiers-classic" / "bin" / "python"
VERIFIERS_V1 = ROOT / ".venv-verifiers-v1" / "bin" / "python"
_SECONDS = 300.0
"""After which a run counts as hung."""


class Ran(NamedTuple):
    """A run of rollouts: what it took, and how many of them came out whole."""

    cpu: float
    wall: float
    megabytes: float
    whole: int
    hung: bool


@contextmanager
def engine(*settings: float) -> Iterator[str]:
    """The URL of the engine, a process that is not measured; `settings` are its arguments."""
    words = [sys.executable, str(HERE / "compare_engine.py"), *map(str, settings)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class Work(NamedTuple):
    """Rollouts of some turns, so many side by side; from the second turn on a question has six
    tokens and five times `more`."""

    rollouts: int
    turns: int
    at_a_time: int
    more: int = 0


Command = tuple[list[str], Callable[[str], int]]
"""The words of a command, and a function that counts the whole rollouts in its output."""
Play = Callable[[str, Work, Path], Command]
"""Takes the engine's URL, what is played, and a folder."""


def by_us(url: str, work: Work, folder: Path, isolation: Isolation = "pooled") -> Command:
    out, environment = folder / "out.jsonl", folder / "talk.py"
    text = (HERE / "compare_talk.py").read_text()
    environment.write_text(f"{text}\n\nTalk.isolation = {isolation!r}\n")
    words = talking(environment, url, work)
    words += ["--limit", str(work.rollouts // GROUP_SIZE), "--out", str(out)]

    def whole(output: str) -> int:
        lines = out.read_bytes().splitlines() if out.exists() else []
        groups = [orjson.loads(line)["envserver"]["rollouts"] for line in lines]
        return sum(
            rollout["turns"] == work.turns and bool(rollout["rows"])
            for g in groups
            for rollout in g
        )

    return [str(ENVSERVER), "process", *words], whole


def talking(environment: Path, url: str, work: Work) -> list[str]:
    """The settings of rollouts of `compare_talk.py`."""
    settings = {
        "--env": environment,
        "--env.turns": work.turns,
        "--env.max_turns": max(8, work.turns),
        "--env.max_token_length": 2**18,
        "--env.worker_timeout": 3600,
        "--env.more": work.more,
        "--env.group_size": GROUP_SIZE,
        "--env.ensure_scores_are_not_same": "false",
        "--openai.base_url": f"{url}/v1",
        "--rollouts.max_concurrent": work.at_a_time,
    }
    return [str(word) for pair in settings.items() for word in pair]


alone: Play = partial(by_us, isolation="dedicated")
"""Each agent in a process of its own, eight at a time, by default."""
walled: Play = partial(by_us, isolation="sandboxed")
"""Each agent in its own sandboxed process, eight at a time, by default."""


def _by_verifiers(python: Path, program: str, kept: str, folder: Path, *words: object) -> Command:
    """
    Args:
        kept: the file of the results folder with a line for each rollout that ended.
    """
    saved = folder / "results"
    # It makes folders for its agents under the home folder, which a killed one leaves there.
    command = ["env", f"HOME={folder}", python, HERE / program, *words, saved]

    def whole(output: str) -> int:
        if found := re.search(r"^whole (\d+)$", output, re.MULTILINE):
            return int(found[1])
        lines = saved / kept
        return lines.read_bytes().count(b"\n") if lines.exists() else 0

    return [str(word) for word in command], whole


def by_verifiers(url: str, work: Work, folder: Path) -> Command:
    return _by_verifiers(VERIFIERS, "compare_verifiers.py", "results.jsonl", folder, url, *work)


def by_verifiers_v1(url: str, work: Work, folder: Path) -> Command:
    kept = "run/traces.jsonl"
    return _by_verifiers(VERIFIERS_V1, "compare_verifiers_v1.py", kept, folder, url, *work)


def play(how: Play, url: str, work: Work, *, kill: bool = False) -> Ran:
    """Runs rollouts to their end.

    Args:
        kill: kill -9 a process that plays rollouts while they are under way.
    """
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        words, whole = how(url, work, folder)
        with (folder / "log").open("w+") as log:
            before, began = _children_cpu(), time.monotonic()
            process = subprocess.Popen(
                words, cwd=folder, env=environment_variables(), stdout=log, stderr=log
            )
            with load.peak_megabytes(process.pid, 0.5) as peak:
                if kill:
                    until(
                        lambda: whole("") >= work.rollouts / 2 or process.poll() is not None,
                        lambda: "too few rollouts",
                    )
                    os.kill(_player(process.pid), signal.SIGKILL)
                hung = not _ended(process, _SECONDS)
            used, wall = _children_cpu() - before, time.monotonic() - began
            log.seek(0)
            return Ran(used, wall, peak[0], min(whole(log.read()), work.rollouts), hung)


def gap(how: Play, url: str, rollouts: int, turns: int) -> float:
    """Milliseconds (median) from an answer of the engine to the same agent's next call."""
    with urllib.request.urlopen(f"{url}/gap"):
        pass
    play(how, url, Work(rollouts, turns, 1))
    with urllib.request.urlopen(f"{url}/gap") as answer:
        return float(answer.read())


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        for pid in [*descendants(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        return False
    return True


def _player(pid: int) -> int:
    """A process that plays rollouts: a worker of ours, or the peer's only process."""
    known = parents()
    forked = [one for one in descendants(pid) if "workers.forkserver" in command(one)]
    return max((one for one in forked if known.get(one) in forked), default=pid)


def _children_cpu() -> float:
    return sum(os.times()[2:4])


async def measure_posts(server: Server, tokens: Sequence[int], groups: int) -> dict[str, float]:
    """Posts of single groups and a batch of them all over the Atropos API, the better of two."""
    costs = load.Costs(server)
    async with load.Wire(server.url) as wire:
        for length in [*tokens] * 2:
            await load.post_and_fetch(wire, costs, length, groups)
    return {case: costs.best(case)[0] for case in costs.of}


async def _post(url: str, groups: int) -> None:
    async with load.Wire(url) as wire:
        await wire.start(10**6)
        await wire.post_all(load.bodies(64), groups, "/scored_data")


async def _waiting(url: str) -> int:
    async with load.Wire(url) as wire:
        return int(msgspec.json.decode(await wire.get("/status"))["queue_size"])


def lost(start: Callable[[], AbstractContextManager[Server]], groups: int) -> float:
    """How many accepted groups a kill -9 of the server lost."""
    with start() as server:
        asyncio.run(_post(server.url, groups))
        os.kill(server.pid, signal.SIGKILL)
    with start() as server:
        return groups - asyncio.run(_waiting(server.url))

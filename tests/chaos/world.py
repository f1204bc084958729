"""The processes of a chaos run: started, killed, started again, each known by a short name."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families
from support.commands import ENVSERVER, environment_variables, free_port, until
from support.postgres import Postgres
from support.process_tree import command, descendants
from support.relay import Relay, relay

from .poster import Poster
from .relay import FaultyRelay, faulty_relay
from .trainer import GO_BACK, read_journal

TESTS: Final = Path(__file__).parent.parent
FEW_WAIT: Final = "--rollouts.max_queued_groups=24"
_UP_SECONDS: Final = 90.0

Name = Literal["engine", "server", "joined", "a", "b"]
NAMES: Final[tuple[Name, ...]] = ("engine", "server", "joined", "a", "b")
DELIVERIES: Final[Mapping[str, str]] = {"a": "shared", "b": "shared"}


@dataclass
class World:
    """Made by `world`.

    Args:
        folder: of journals, logs and, unless `postgres` has it, the store's file.
        deliveries: of the trainers: each is a run of its own.
        witness: what the engine answered.
        relay: between the server and all its clients.
        poster: an environment of somebody else, over the Atropos wire.
        postgres: None: the store is a file.
    """

    folder: Path
    store: str
    ports: dict[str, int]
    deliveries: Mapping[str, str]
    witness: Relay
    witness_url: str
    relay: FaultyRelay
    poster: Poster
    postgres: Postgres | None
    alone: bool = False
    """Whether the server runs without an environment of its own, to let trainers finish."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)

    def keep_up(self) -> None:
        """Starts what is not there; returns at once."""
        if self.postgres is not None and not self.postgres.is_running():
            self.postgres.start()
        for name in NAMES:
            if name == "joined" and self.alone:
                continue
            process = self.processes.get(name)
            if process is None or process.poll() is not None:
                self._start(name)

    def _start(self, name: Name) -> None:
        self.starts[name] += 1
        with (self.folder / f"{name}.log").open("ab") as log:
            log.write(f"--- start {self.starts[name]}\n".encode())
            log.flush()
            self.processes[name] = subprocess.Popen(
                [str(word) for word in self._words(name)],
                cwd=self.folder,
                env=_variables(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _words(self, name: Name) -> list[object]:
        rollouts = [
            "--env", "math", "--env.group_size", 2, "--openai.model_name", "sim",
            "--openai.base_url", f"{self.witness_url}/v1", "--rollouts.max_concurrent", 4,
            "--workers.processes", 1, "--env.ensure_scores_are_not_same", "false",
        ]  # fmt: skip
        port = ["--server.port", self.ports["server"], "--store", self.store]
        if name == "engine":
            return [
                ENVSERVER, "models", "sim", "--env", "math", "--port", self.ports["engine"],
                "--sim.latency_seconds", 0.02,
            ]  # fmt: skip
        if name == "server":
            if self.alone:
                return [ENVSERVER, "run-api", *port]
            return [ENVSERVER, "serve", *rollouts, *port, FEW_WAIT]
        if name == "joined":
            return [ENVSERVER, "join", self.relay.url, *rollouts, "--env.seed", 7]
        run = [self.relay.url, name, self.deliveries[name], self.folder]
        return [sys.executable, "-m", "chaos.trainer", *run]

    def kill(self, name: Name) -> None:
        """kill -9 of the process alone: what it began has to notice by itself."""
        process = self.processes[name]
        process.kill()
        process.wait(30)

    def kill_child(self, of: Name, part: str, draw: random.Random) -> bool:
        """kill -9 of one of the processes below `of` with `part` in their words; False: none is."""
        below = sorted(descendants(self.processes[of].pid))
        found = [pid for pid in below if part in command(pid)]
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(found), signal.SIGKILL)
        return bool(found)

    def pause(self, name: Name, seconds: float) -> None:
        """Stops the process for a while, as a machine that swaps does."""
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            process.send_signal(signal.SIGCONT)

    def go_back(self, trainer: Literal["a", "b"]) -> None:
        """The trainer starts again from an earlier checkpoint."""
        (self.folder / f"{trainer}.{GO_BACK}").touch()
        self.kill(trainer)

    def until_up(self) -> None:
        """Returns when every process has begun its work."""
        self.keep_up()
        url = f"http://127.0.0.1:{self.ports['server']}/healthz"

        def answers() -> bool:
            self.keep_up()
            try:
                return httpx.get(url, timeout=2).status_code == 200
            except httpx.HTTPError:
                return False

        until(answers, _UP_SECONDS, lambda: self.logs("server"))

    def until_progress(self, seconds: float = 120.0) -> None:
        """Returns when a trainer has acknowledged something more.

        Raises:
            AssertionError: none has within `seconds`, although everything was kept up.
        """
        before = self._acks()

        def has_more() -> bool:
            self.keep_up()
            return self._acks() > before

        until(has_more, seconds, lambda: f"no progress; {self.logs(*NAMES)}")

    def _acks(self) -> int:
        files = [self.folder / f"{name}.jsonl" for name in self.deliveries]
        return sum(path.read_bytes().count(b'"acked"') for path in files if path.exists())

    def let_finish(self, seconds: float) -> None:
        """No new groups; returns when the trainers have acknowledged all that there are.

        Raises:
            AssertionError: they have not within `seconds`.
        """
        self.poster.stop()
        joined = self.processes["joined"]
        joined.terminate()
        joined.wait(60)
        self.alone = True
        self.processes["server"].terminate()
        self.processes["server"].wait(90)
        self.until_up()

        def is_done() -> bool:
            self.keep_up()
            return self._left() == 0

        until(is_done, seconds, lambda: f"{self._left()} groups left; {self.logs('server', 'a')}")

    def _left(self) -> int:
        """Groups that some run has not acknowledged; -1: the server does not say."""
        url = f"http://127.0.0.1:{self.ports['server']}/metrics"
        try:
            metrics = httpx.get(url, timeout=5).raise_for_status().text
        except httpx.HTTPError:
            return -1
        depths = [
            sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
            if sample.name == "envserver_queue_depth"
        ]
        return int(sum(depths)) if len(depths) >= len(self.deliveries) else -1

    def journals(self) -> dict[str, list[dict[str, object]]]:
        return {name: read_journal(self.folder / f"{name}.jsonl") for name in self.deliveries}

    def logs(self, *names: str) -> str:
        """The ends of what they said."""
        texts = [(self.folder / f"{name}.log").read_text(errors="replace") for name in names]
        return "\n".join(text[-3000:] for text in texts)

    def end(self) -> None:
        """Ends every process by its own id."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def _variables() -> dict[str, str]:
    kept = environment_variables()
    return kept | {"PYTHONPATH": os.pathsep.join([str(TESTS), kept.get("PYTHONPATH", "")])}


@contextlib.contextmanager
def world(
    folder: Path,
    *,
    store: str,
    postgres: Postgres | None,
    deliveries: Mapping[str, str] = DELIVERIES,
) -> Iterator[World]:
    """Everything up and at work."""
    ports = {"engine": free_port(), "server": free_port()}
    with (
        relay(f"http://127.0.0.1:{ports['engine']}") as (witness_url, witness),
        faulty_relay(f"http://127.0.0.1:{ports['server']}") as before_server,
        Poster(before_server.url) as poster,
    ):
        made = World(
            folder,
            store,
            ports,
            deliveries,
            witness,
            witness_url,
            before_server,
            poster,
            postgres,
        )
        try:
            made.until_up()
            poster.start()
            yield made
        finally:
            made.end()

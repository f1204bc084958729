"""The processes of a chaos run: started, killed, started again, each known by a short name."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self

import httpx
from envserver_records.http_errors import Urls
from envserver_records.servers import ServersClient
from prometheus_client.parser import text_string_to_metric_families
from support.commands import ENVSERVER, environment_variables, free_port, until
from support.postgres import Postgres
from support.process_tree import command, descendants
from support.relay import Relay, relay
from support.waiting import PATIENCE

from .relay import FaultyRelay, Told, faulty_relay
from .trainer import GO_BACK, read_journal

_PAUSE_SECONDS = 0.15


class Poster:
    """A thread; `start` it, `stop` it. The relay in between remembers what was accepted."""

    def __init__(self, urls: Urls) -> None:
        self._urls = urls
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poster", daemon=True)
        self._random = random.Random(17)
        self.repeated = 0
        self.posted = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the group that is under way."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        with ServersClient(self._urls, timeout=15) as http:
            while not self._stopping.wait(_PAUSE_SECONDS):
                self._post(http, f"poster-{self.posted}")
                self.posted += 1

    def _post(self, http: httpx.Client, key: str) -> None:
        """Until it is accepted; the same key makes sure that it is stored once."""
        draw = self._random
        lengths = [draw.randint(4, 300) for _ in range(2)]
        tokens = [[draw.randrange(50_000) for _ in range(length)] for length in lengths]
        masks = [[-100] * 2 + row[2:] for row in tokens]
        group = {"tokens": tokens, "masks": masks, "scores": [0.0, 1.0]}
        for _ in range(600):
            try:
                answer = http.post("/scored_data", json=group, headers={"Idempotency-Key": key})
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == 200:
                return
            self.repeated += 1
            if self._stopping.wait(0.1) and self.repeated % 600 == 599:
                return


TESTS: Final = Path(__file__).parent.parent
SHORT: Final = ("--env", "math")
LONG: Final = (
    "--env", TESTS / "benchmarks" / "compare_talk.py", "--env.turns", 40, "--env.max_turns", 40,
    "--env.more", 40, "--env.max_token_length", 2**18,
)  # fmt: skip
"""Rollouts of one turn, and of forty, each of which takes longer than most faults let it."""
FEW_WAIT: Final = "--rollouts.max_queued_groups=24"

TAKEOVER_SECONDS: Final = 2

Name = str
"""engine, joined, a, b, and the servers: server, or server-1, server-2, ..."""
DELIVERIES: Final[Mapping[str, str]] = {"a": "shared", "b": "shared"}


@dataclass
class World:
    """Made by `world`.

    Args:
        folder: of journals, logs and, unless `postgres` has it, the store's file.
        deliveries: of the trainers: each is a run of its own.
        witness: what the engine answered.
        relays: by the servers' names, between the server and all its clients.
        told: what all of them heard.
        poster: an external environment, over the Atropos API.
        postgres: None: the store is a file.
        environment: SHORT or LONG.
    """

    folder: Path
    store: str
    ports: dict[str, int]
    deliveries: Mapping[str, str]
    witness: Relay
    witness_url: str
    relays: Mapping[str, FaultyRelay]
    told: Told
    poster: Poster
    postgres: Postgres | None
    environment: Sequence[object]
    alone: bool = False
    """Whether the server runs without an environment of its own, to let trainers finish."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)

    @property
    def names(self) -> tuple[Name, ...]:
        return ("engine", *self.relays, "joined", "a", "b")

    @property
    def is_shared(self) -> bool:
        """Whether several servers share the store."""
        return len(self.relays) > 1

    def keep_up(self) -> None:
        """Starts what is not there; returns at once."""
        if self.postgres is not None and not self.postgres.is_running():
            self.postgres.start()
        for name in self.names:
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
            *self.environment, "--env.group_size", 2, "--openai.model_name", "sim",
            "--openai.base_url", f"{self.witness_url}/v1", "--rollouts.max_concurrent", 4,
            "--workers.processes", 1, "--env.ensure_scores_are_not_same", "false",
        ]  # fmt: skip
        urls = ",".join(relay.url for relay in self.relays.values())
        if name == "engine":
            return [
                ENVSERVER, "models", "sim", "--env", "math", "--port", self.ports["engine"],
                "--sim.latency_seconds", 0.02,
            ]  # fmt: skip
        if name in self.relays:
            port = ["--server.port", self.ports[name], "--store", self.store]
            if self.is_shared:
                port += ["--store.shared", "--server.takeover_seconds", TAKEOVER_SECONDS]
            if self.is_shared or self.alone:
                return [ENVSERVER, "run-api", *port]
            return [ENVSERVER, "serve", *rollouts, *port, FEW_WAIT]
        if name == "joined":
            return [ENVSERVER, "join", urls, *rollouts, "--env.seed", 7]
        way = "stream" if self.is_shared and name == "b" else "lease"
        run = [urls, name, self.deliveries[name], self.folder, way]
        return [sys.executable, "-m", "chaos.trainer", *run]

    def kill(self, name: Name) -> None:
        """kill -9 of the process alone: what it began has to notice by itself."""
        process = self.processes[name]
        process.kill()
        process.wait(PATIENCE)

    def kill_child(self, of: Name, part: str, draw: random.Random) -> bool:
        """kill -9 of one of the processes below `of` with `part` in their words; False: none is."""
        found = [pid for pid in sorted(descendants(self.processes[of].pid)) if part in command(pid)]
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(found), signal.SIGKILL)
        return bool(found)

    def pause(self, name: Name, seconds: float) -> None:
        """Stops the process for a while, as a machine that swaps or loses its network does."""
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

        def answers() -> bool:
            self.keep_up()
            try:
                found = [httpx.get(f"{url}/healthz", timeout=30) for url in self._server_urls()]
            except httpx.HTTPError:
                return False
            return all(answer.status_code == 200 for answer in found)

        until(answers, lambda: self.logs(*self.relays))

    def _server_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self.ports[name]}" for name in self.relays]

    def until_progress(self) -> None:
        """Returns when a trainer has acknowledged something more.

        Raises:
            AssertionError: none has in time, although everything was kept up.
        """
        before = self._acks()

        def has_more() -> bool:
            self.keep_up()
            return self._acks() > before

        until(has_more, lambda: f"no progress; {self.logs(*self.names)}")

    def until_joined(self) -> None:
        """Returns when the joined environment has delivered a group."""

        def has_delivered() -> bool:
            self.keep_up()
            return bool(self.told.joined)

        until(has_delivered, lambda: self.logs("joined"))

    def _acks(self) -> int:
        files = [self.folder / f"{name}.jsonl" for name in self.deliveries]
        return sum(path.read_bytes().count(b'"acked"') for path in files if path.exists())

    def let_finish(self) -> None:
        """No new groups; returns when the trainers have acknowledged all that there are.

        Raises:
            AssertionError: they have not in time.
        """
        self.poster.stop()
        joined = self.processes["joined"]
        joined.terminate()
        joined.wait(PATIENCE)
        self.alone = True
        if not self.is_shared:
            self.processes["server"].terminate()
            self.processes["server"].wait(PATIENCE)
        self.until_up()

        def is_done() -> bool:
            self.keep_up()
            return self._left() == 0 and all(map(_is_settled, self.journals().values()))

        logs = (*self.relays, "a")
        until(is_done, lambda: f"{self._left()} groups left; {self.logs(*logs)}")

    def _left(self) -> int:
        """Groups that some run has not acknowledged; -1: no server says."""
        return max(map(self._left_at, self._server_urls()))

    def _left_at(self, server_url: str) -> int:
        try:
            metrics = httpx.get(f"{server_url}/metrics", timeout=PATIENCE).raise_for_status().text
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
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE)


def _is_settled(lines: list[dict[str, object]]) -> bool:
    """Whether the trainer has written down what became of its last checkpoint's lease."""
    saved = [line["lease"] for line in lines if line["what"] == "saved"]
    ended = {line["lease"] for line in lines if line["what"] in ("acked", "lost")}
    return not saved or saved[-1] in ended


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
    servers: int = 1,
    environment: Sequence[object] = SHORT,
) -> Iterator[World]:
    """Everything up and at work.

    Args:
        servers: number of servers that share the store.
    """
    names = ["server"] if servers == 1 else [f"server-{n}" for n in range(1, servers + 1)]
    ports = {name: free_port() for name in ("engine", *names)}
    told = Told()
    with (
        relay(f"http://127.0.0.1:{ports['engine']}") as (witness_url, witness),
        contextlib.ExitStack() as stack,
    ):
        relays = {
            name: stack.enter_context(faulty_relay(f"http://127.0.0.1:{ports[name]}", told))
            for name in names
        }
        poster = stack.enter_context(Poster([one.url for one in relays.values()]))
        made = World(
            folder, store, ports, deliveries, witness, witness_url, relays, told, poster, postgres,
            environment,
        )  # fmt: skip
        try:
            made.until_up()
            poster.start()
            yield made
        finally:
            made.end()

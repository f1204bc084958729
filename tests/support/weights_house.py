"""Engines, trainers and agents around weight updates.

A local engine that can be killed and started again, a trainer that sends weights over gloo, and a
whole house: agents that sample while versions are published. Out of that: a `Proof` over every
token that was delivered: whether the weights of the version that it carries give its logprob.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from envserver_clients.http import SyncEnvClient
from envserver_clients.records import Row
from envserver_clients.weights import Published, WeightPush

from support.commands import free_port, running
from support.versions import LineProcess, VersionMaker, line_process

from .learning import variables
from .waiting import PATIENCE


@dataclass
class Local:
    """An engine of ours that can be killed and started again at its address."""

    python: Path
    model: Path
    port: int
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = (
            *("--model", self.model, "--served-model-name", "tiny", "--port", str(self.port)),
            *("--dtype", "float32", "--enable-lora", "--threads", "1"),
        )
        self.process = subprocess.Popen(
            [self.python, "-m", "envserver_local", *words],
            stdout=subprocess.PIPE,
            text=True,
            env=variables(),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(self.url)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)


@contextlib.contextmanager
def local_engine(python: Path, model: Path) -> Iterator[Local]:
    engine = Local(python, model, free_port())
    engine.start()
    try:
        yield engine
    finally:
        engine.kill()


SendingTrainer = LineProcess
"""A process with a model, which does what it is asked."""


def sending_trainer(
    python: Path, model: Path, **settings: Any
) -> contextlib.AbstractContextManager[LineProcess]:
    """A trainer of the model in the folder `model`; `settings` are those of `Transfer`."""
    return line_process(LineProcess, python, "transfer_process.py", model, json.dumps(settings))


_SERVE = (
    "serve", "--env", "math", "--env.mode", "single", "--env.group_size", 2,
    "--env.ensure_scores_are_not_same", "false", "--workers.processes", 1, "--store", "groups.db",
    "--openai.mode", "tokens", "--rollouts.max_concurrent", 4,
)  # fmt: skip


@dataclass
class Proof:
    """
    Args:
        published: what each publish told.
        tokens: trained tokens by version.
        mixed: rows with tokens of more than one version.
        furthest: the greatest difference of a token's logprob from the trainer's own, with the
            weights of the version that the token carries.
        nearest_other: the least, over the rows, of how far the weights of the next version are from
            a row: what a wrong version would look like.
    """

    published: list[Published] = field(default_factory=list)
    tokens: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    mixed: int = 0
    furthest: float = 0.0
    nearest_other: float = float("inf")

    def add(self, row: Row, maker: VersionMaker) -> None:
        """Scores a row with the weights of each version in it."""
        assert row.logprobs is not None
        trained = row.mask.astype(bool)
        versions = sorted(set(row.versions[trained].tolist()))
        self.rows += 1
        self.mixed += len(versions) > 1
        for version in versions:
            here = np.flatnonzero(trained & (row.versions == version))
            own, other = (_apart(row, here, maker, one) for one in (version, version + 1))
            self.tokens[version] += len(here)
            self.furthest = max(self.furthest, own)
            if len(versions) == 1 and len(here) > 3:
                self.nearest_other = min(self.nearest_other, other)

    def table(self, title: str) -> str:
        """For people."""
        checked = max(one.difference or 0.0 for one in self.published)
        return (
            f"{title}: {len(self.published)} versions, {self.rows} rows ({self.mixed} of several "
            f"versions), {self.tokens.total()} tokens; furthest {self.furthest:.2g} from the "
            f"trainer (checks {checked:.2g}), a wrong version {self.nearest_other:.2g} at least"
        )


def _apart(row: Row, here: np.ndarray[Any, Any], maker: VersionMaker, version: int) -> float:
    assert row.logprobs is not None
    (scored,) = maker.score(version, [row.tokens.tolist()])
    return float(np.abs(np.asarray(scored)[here - 1] - row.logprobs[here]).max())


def prove(
    folder: Path,
    base_url: str,
    maker: VersionMaker,
    make_push: Callable[[SyncEnvClient], WeightPush],
    versions: Collection[int],
    words: Sequence[object] = (),
    enough: Callable[[Proof], bool] = lambda _: False,
) -> Proof:
    """Publishes `versions` while agents sample, and leases until tokens of each have come.

    Args:
        words: more settings of the server.
        enough: asked after each version; True leaves the rest out.
    """
    proof, port, made = Proof(), free_port(), set(versions)
    engine = ("--openai.base_url", base_url, "--port", port)
    with running(*_SERVE, *engine, *words, folder=folder) as server:
        server.wait_for("Trainers: ")
        with SyncEnvClient(f"http://127.0.0.1:{port}", run="trainer", batch_size=1) as client:
            push = make_push(client)
            for version in versions:
                check = maker.check(version)
                proof.published.append(push.publish(version, maker.saver(version), check))
                while not proof.tokens[version]:
                    batch = next(client.batches(idle_seconds=PATIENCE))
                    for row in batch.rows:
                        # Before the first publish the engine may have any weights.
                        if set(row.versions[row.mask.astype(bool)].tolist()) <= made:
                            proof.add(row, maker)
                    client.ack(batch)
                if enough(proof):
                    break
    return proof

"""An OpenEnv server's environment: its episodes are rollouts, its rewards are those of our turns.

The connection is the server process's (`services`), so workers need no network, and ends with the
attempt; a failure of the OpenEnv server is retried and never scored.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, SecretStr, field_validator

from envserver import (
    ConfigError,
    Environment,
    LimitReached,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Service,
    Split,
    Task,
)
from envserver.rows.sources import every_row

from .agent import Player, filled
from .server import connected

_TEST_SEEDS = {"train": 0, "validation": 1_000_000, "test": 2_000_000}


class OpenEnv(Environment):
    """The environment of an OpenEnv server."""

    address: ClassVar[str] = ""
    """`http://...`, `https://...` or `docker://IMAGE`."""
    reward_range = (float("-inf"), float("inf"))
    solved_at = 1.0

    class Config(Environment.Config):
        system: str = ""
        """The system message; empty: none."""
        prompt: str = ""
        """Template of the first message, with fields of the first observation in braces, such as
        "Question: {question}"; empty: the only field that is not empty, or all fields as JSON."""
        observation: str = ""
        """The same for later observations."""
        answer: str = ""
        """Regular expression whose first group is the model's answer; empty: its whole text."""
        action: str = ""
        """JSON of an action in which "{answer}" stands for the answer, such as '{"guess":
        "{answer}", "final": true}'; empty: by the server's schema: its tools, its only field of
        text, or one tool that takes all fields."""
        reset: dict[str, Any] = {}
        """Arguments of every reset, beside the seed."""
        rows: Path | None = None
        """File (.jsonl, .json, .csv, ...) with the reset arguments of each task; unset: seeds."""
        seeds: PositiveInt | None = None
        """Number of tasks that are seeds; unset: endless."""
        reward: Literal["sum", "last"] = "sum"
        """The reward of a rollout: the sum of its steps', each a reward of its turn, or the last
        one alone."""
        server_errors: Literal["server", "model"] = "server"
        """Who is to blame when the server raises on an action: the server (the rollout is retried)
        or the model (it gets the refusal)."""
        token: SecretStr | None = None
        """Bearer token for the server."""
        connect_seconds: PositiveFloat = 10.0
        """Seconds to connect."""
        answer_seconds: PositiveFloat = 60.0
        """Seconds for each answer of the server."""
        wait_seconds: NonNegativeFloat = 120.0
        """Seconds to wait for a session of a server that is full."""

        @field_validator("action")
        @classmethod
        def _is_json(cls, text: str) -> str:
            if text:
                filled(text, "")
            return text

        @field_validator("answer")
        @classmethod
        def _has_a_group(cls, text: str) -> str:
            try:
                groups = re.compile(text).groups
            except re.error as error:
                raise ValueError(f"is not a regular expression: {error}") from None
            if text and not groups:
                raise ValueError("needs a group, such as <answer>(.*?)</answer>")
            return text

    def tasks(self, split: Split) -> Iterator[Task]:
        given = self.config.reset
        if self.config.rows is not None:
            for number, row in enumerate(every_row(self.config.rows)):
                yield Task(f"row-{number}", {"reset": {**given, **row}})
            return
        first = _TEST_SEEDS[split] + self.config.seed
        for seed in itertools.islice(itertools.count(first), self.config.seeds):
            yield Task(f"seed-{seed}", {"reset": {**given, "seed": seed}})

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        return connected(type(self).address, self.config)

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        player = Player(self.config, run)
        try:
            await player.play(task.public["reset"])
        except LimitReached:  # what was done keeps its rewards
            if run.seconds_left <= 0:
                raise
        return {"done": player.done, "rewards": player.rewards}

    def score(self, task: Task, result: Result) -> Score:
        output = result.output if isinstance(result.output, dict) else {}
        rewards, done = output.get("rewards") or [], bool(output.get("done"))
        if done and not rewards:
            return Score(error="The OpenEnv server ended the episode without any reward.")
        metrics = {"done": float(done)}
        if self.config.reward == "last":
            return Score(reward=rewards[-1] if rewards else 0.0, metrics=metrics)
        return Score(reward=0.0, metrics=metrics)  # the turns have theirs

    def final_answer(self, result: Result) -> str:
        messages: list[Message] = result.messages
        return str(messages[-1].get("content") or "") if messages else ""


def openenv_environment(address: str) -> type[Environment]:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https", "docker") or not parts.netloc:
        raise ConfigError(
            f"openenv:{address} is not the address of a server.",
            hint="openenv:http://localhost:8000, or openenv:docker://IMAGE.",
        )
    place = f"{parts.netloc.rpartition('@')[2]}{parts.path}".strip("/")
    name = f"openenv_{re.sub(r'[^a-z0-9]+', '_', place.lower()).strip('_')}"
    address = address.rstrip("/")
    doc = OpenEnv.__doc__
    return type("OpenEnv", (OpenEnv,), {"address": address, "name": name, "__doc__": doc})

"""Groups that are hard to show: several agents, pictures, hostile texts, long ones, many."""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from envserver_records.errors import Blame
from envserver_records.packing import pack
from envserver_records.records import (
    Conversation,
    Group,
    SandboxUsage,
    Score,
    Sequence,
    Trajectory,
    Usage,
)
from envserver_records.scores import TurnReward
from envserver_records.timings import FailedAttempt, Printed, Timing

from envserver.api.metrics import Metrics
from envserver.store import GroupPut
from envserver.store.facts import facts_of_rewards
from envserver.store.sink import put_of

from .api import Api, running_api
from .trajectories import trajectory

HOSTILE = (
    "<script>document.title = 'pwned'</script>"
    "<img src=x onerror=\"document.title = 'pwned'\"><b>bold?</b> [link](javascript:alert(1))"
    " \x1b[31mred\x1b[0m \u202eevil\u202c \u200bunseen\u200b \x00 \U000e0041"
)
LONG = "A line of a very long text, which has no end.\n" * 25_000  # more than a megabyte
ODD = [
    {"role": 5, "name": {"a": 1}, "content": [None, 5, {"type": "text", "text": 7}]},
    {"role": "assistant", "content": {"no": "list"}, "tool_calls": [None, "x", {"function": "f"}]},
    {"role": "assistant", "content": None, "reasoning": ["r"], "tool_calls": {"function": {}}},
    {"role": "tool", "tool_call_id": 7, "content": [{"type": "image_url", "image_url": 5}]},
    {},
]
"""Messages that are not as any API has them."""
LONG_ROW = 30_000
_ENVIRONMENTS = ("math", "code", "tau", "video")


def picture(width: int = 64, height: int = 40) -> str:
    """A PNG with a gradient, as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        end = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + end

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    lines = b"".join(
        b"\0" + b"".join(bytes([4 * x % 256, 6 * y % 256, 120]) for x in range(width))
        for y in range(height)
    )
    made = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)
    made += chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{b64encode(made).decode()}"


def row(length: int, agent: str | None = None, seed: int = 0) -> Sequence:
    """A row: contexts of 100 tokens, turns of 200; every third turn is by version 4."""
    rng = np.random.default_rng(seed)
    place = np.arange(length)
    trained = (place % 300 >= 100).astype(np.uint8)
    calls = np.where(trained, place // 300, -1).astype(np.int32)
    logprobs = np.where(trained, -rng.exponential(0.6, length), 0).astype(np.float32)
    return Sequence(
        tokens=rng.integers(300, 1200, length).astype(np.int32),
        mask=trained,
        logprobs=logprobs,
        calls=calls,
        versions=np.where(trained, 3 + (calls % 3 == 2), -1).astype(np.int32),
        path=list(range(1 + (length - 1) // 300)),
        agent=agent,
        flags=["mixed_versions"] if length > 900 else [],
    )


def conversation(place: int, said: str = "") -> list[dict[str, Any]]:
    """A conversation that parts from the others' in its first answer."""
    call = {
        "id": f"call-{place}",
        "type": "function",
        "function": {"name": "look", "arguments": f'{{"where": "shelf {place}"}}'},
    }
    return [
        {"role": "system", "content": "You look for things.\n" + "Be careful. " * 80},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Where is the lamp? Here is the room:"},
                {"type": "image_url", "image_url": {"url": picture()}},
                {"type": "image_url", "image_url": {"url": "https://example.com/spy.png"}},
            ],
        },
        {
            "role": "assistant",
            "reasoning_content": f"I think about shelf {place}. " * 20,
            "content": f"I will look at the shelf with number {place}.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": f"call-{place}", "content": f"There are {place} lamps."},
        {"role": "assistant", "content": said or f"The answer is {place}."},
        {"role": "user", "content": "Thank you."},
    ]


def _rollout(group_id: str, place: int, said: str = "", **changes: Any) -> Trajectory:
    reward = (1.0, 0.0, 0.5, 0.25)[place % 4]
    critic = [
        {"role": "user", "content": "Was it right?"},
        {"role": "assistant", "content": "Partly."},
    ]
    facts: dict[str, Any] = {
        "messages": conversation(place, said),
        "task_id": "lamp",
        "env": "rooms",
        "score": Score(
            reward=reward,
            components={"found": reward, "brief": 0.5},
            metrics={"steps": 2.0},
            turns=[TurnReward(0, 0.25, "seeker"), TurnReward(1, -0.1, "seeker")],
        ),
        "turns": 2,
        "tools": [{"type": "function", "function": {"name": "look", "description": "Looks."}}],
        "others": [
            Conversation(
                agent="critic",
                trained=False,
                model="judge",
                messages=critic,
                tools=[],
                turns=1,
                completion_tokens=3,
            )
        ],
        "agent_calls": {"seeker": [0, 1], "critic": [2]},
        "usage": Usage(
            seconds=4.0,
            model_seconds=2.5,
            prompt_tokens=900,
            completion_tokens=120,
            scoring_seconds=0.4,
            sandbox=SandboxUsage(
                cpu_seconds=0.7, peak_memory_mb=81.0, executions=2, killed={"memory": 1}
            ),
        ),
        "timings": [
            Timing(kind="engine", started=0.1, seconds=1.2, name="sim", agent="seeker",
                   first=0.3, call=0, row=0, start=100, end=300),
            Timing(kind="tool", started=1.3, seconds=0.5, name="look", agent="seeker"),
            Timing(kind="sandbox", started=1.4, seconds=0.3, name="python"),
            Timing(kind="engine", started=1.9, seconds=1.3, name="sim", agent="seeker", call=1,
                   row=0, start=400, end=600),
            Timing(kind="scoring", started=3.3, seconds=0.4),
        ],
        "attempts": [
            FailedAttempt(attempt=1, kind="engine_error", blame=Blame.ENGINE,
                          message="The engine hung up. " + HOSTILE, seconds=1.5)
        ] if place == 1 else [],
        "attempt": 2 if place == 1 else 1,
        "printed": [Printed(0.5, "stdout", "looking ..."), Printed(1.4, "log", "found it")],
        "flags": ["repetition"] if place == 2 else [],
    }  # fmt: skip
    return trajectory(f"{group_id}-r{place}", row(900, "seeker", place), **(facts | changes))


def group_of(group_id: str, rollouts: list[Trajectory], **changes: Any) -> Group:
    facts: dict[str, Any] = {
        "index": 0,
        "env": "rooms",
        "task_id": "lamp",
        "split": "train",
        "model": "sim",
        "policy_version": 3,
        "created_at": 1_790_000_000.0,
        "public": {"question": "Where is the lamp?"},
    }
    return Group(group_id=group_id, trajectories=rollouts, **(facts | changes))


def hard_groups() -> list[Group]:
    """`rooms`: side by side; `hostile`: texts that attack; `long`: a megabyte, 30,000 tokens, 126
    messages."""
    lost = FailedAttempt(
        attempt=3, kind="engine_error", blame=Blame.ENGINE, message="No answer.", seconds=2.0
    )
    rooms = [_rollout("rooms", place) for place in range(4)]
    limit = {"truncated": True, "limit": "tokens"}
    ended = Usage(seconds=9.0, model_seconds=8.0, completion_tokens=2048, ended_by="tokens")
    hostile = [
        _rollout("hostile", 0, HOSTILE),
        _rollout("hostile", 1, usage=ended, messages=[*conversation(1, HOSTILE), *ODD], **limit),
    ]
    more = [{"role": "user", "content": f"And then, {number}?"} for number in range(120)]
    messages = [*conversation(0, LONG), *more]
    long = [_rollout("long", 0, messages=messages, sequences=[row(LONG_ROW, "seeker")])]
    return [
        group_of("rooms", rooms, asked=5, lost={"engine_error": 1}, missing={"4": [lost]}),
        group_of("hostile", hostile, task_id="lamp <b>", policy_version=4),
        group_of("long", long, policy_version=5),
    ]


def many_groups(count: int) -> list[GroupPut]:
    """Groups of which only the facts are there, for lists."""
    rng = random.Random(0)
    made = []
    for number in range(count):
        rewards: list[float | None] = [float(rng.random() < 0.4) for _ in range(4)]
        put = GroupPut(
            group_id=f"many-{number:06}",
            body=b"",
            env=_ENVIRONMENTS[number % 4],
            format="group",
            size=4,
            tokens=400,
            max_length=100 + number % 7,
            policy_version=number // 1000,
            facts=facts_of_rewards(rewards, f"task-{number % 500}"),
        )
        made.append(put)
    return made


class GroupsHouse:
    """A server with groups, at `url`; it runs in `loop`, in another thread."""

    def __init__(self, api: Api, loop: asyncio.AbstractEventLoop) -> None:
        self._api = api
        self._loop = loop
        self.url = api.url

    def add(self, *groups: GroupPut) -> None:
        """Puts groups, as if they had just been finished."""
        asyncio.run_coroutine_threadsafe(self._api.store.put(list(groups)), self._loop).result(60)


@contextlib.asynccontextmanager
async def groups_house(folder: Path, many: int = 0) -> AsyncIterator[GroupsHouse]:
    """The trainer API over a store with `many_groups(many)` and then `hard_groups`."""
    async with running_api(folder / "groups.db", metrics=Metrics()) as api:
        made = many_groups(many)
        for start in range(0, many, 5000):
            await api.store.put(made[start : start + 5000])
        await api.store.put([put_of(one, pack(one)) for one in hard_groups()])
        yield GroupsHouse(api, asyncio.get_running_loop())

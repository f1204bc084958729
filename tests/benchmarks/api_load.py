"""What is sent to and fetched from a trainer API in its benchmark, as the clients of the Atropos
wire and our own do it.

Posts: `json.dumps`, gzip at Python's default level, a connection for each, as atroposlib's
environments post them; 8 are under way at a time. Batches: `GET /batch` for gzip, as `requests`
asks.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import zlib
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
from envserver_records.records import Group, Score, Trajectory, Usage, pack, unpack
from envserver_records.records import Sequence as TokenSequence

from envserver.remote import batch
from envserver.remote.messages import KEY_HEADER
from envserver.rollouts.stream import group_id as stream_group_id
from envserver.rollouts.stream import stream_prefix
from envserver.store import GroupPut

AT_A_TIME = 8
ENVIRONMENT = "bench"
_VOCABULARY = 150_000


def rows(count: int, tokens: int, seed: int) -> list[dict[str, list[Any]]]:
    """Sequences of a quarter of prompt and three quarters that were sampled: ids as frequent as
    words are, logprobs as engines give them (float32, written out as Python's floats).
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = random.zipf(1.2, tokens) % _VOCABULARY
        sampled = np.arange(tokens) >= tokens // 4
        logprobs = np.where(sampled, -random.exponential(0.6, tokens), 1.0).astype(np.float32)
        found.append(
            {
                "tokens": ids.tolist(),
                "masks": np.where(sampled, ids, -100).tolist(),
                "logprobs": logprobs.tolist(),
            }
        )
    return found


def posted(count: int, tokens: int, seed: int = 0, env_id: int | None = None) -> bytes:
    """A group as an environment posts it, before gzip."""
    made = rows(count, tokens, seed)
    group = {
        "tokens": [row["tokens"] for row in made],
        "masks": [row["masks"] for row in made],
        "scores": [float(index % 2) for index in range(count)],
        "inference_logprobs": [row["logprobs"] for row in made],
        "ref_logprobs": None,
        "overrides": None,
        "group_overrides": {},
        "env_id": env_id,
    }
    return json.dumps(group).encode()


def packed(index: int, count: int, tokens: int) -> GroupPut:
    """The same group as one of our own environments makes it: that at `index` of its stream."""
    group_id = stream_group_id(stream_prefix(ENVIRONMENT, "train", 0), index, "task")
    group = Group(
        group_id=group_id,
        index=index,
        env=ENVIRONMENT,
        task_id="task",
        split="train",
        seed=0,
        trajectories=[
            _trajectory(f"{group_id}-{number}", row)
            for number, row in enumerate(rows(count, tokens, index % 16))
        ],
        policy_version=1,
        generation_params={},
    )
    return GroupPut(
        group_id=group_id,
        env=ENVIRONMENT,
        format="group",
        body=pack(group),
        size=count,
        tokens=count * tokens,
        max_length=tokens,
        policy_version=1,
    )


def _trajectory(rollout_id: str, row: dict[str, list[Any]]) -> Trajectory:
    tokens = np.array(row["tokens"], np.int32)
    mask = (np.array(row["masks"]) != -100).astype(np.uint8)
    calls = np.where(mask, 0, -1).astype(np.int32)
    sequence = TokenSequence(
        tokens=tokens,
        mask=mask,
        logprobs=np.array(row["logprobs"], np.float32) * mask,
        calls=calls,
        versions=np.where(mask, 1, -1).astype(np.int32),
        path=[0],
    )
    return Trajectory(
        rollout_id=rollout_id,
        attempt=1,
        task_id="task",
        env=ENVIRONMENT,
        sequences=[sequence],
        messages=[],
        tools=[],
        output=None,
        score=Score(reward=1.0),
        finish_reason="stop",
        truncated=False,
        limit=None,
        turns=1,
        usage=Usage(),
    )


def renumbered(body: bytes, index: int) -> bytes:
    """The packed group `body` at another place of its stream, as it is posted."""
    group = unpack(body, Group)
    group.index = index
    group.group_id = stream_group_id(stream_prefix(ENVIRONMENT, "train", 0), index, "task")
    return batch.compressed(pack(group))


def compressed(bodies: Sequence[bytes]) -> list[bytes]:
    """As atroposlib sends them."""
    return [gzip.compress(body) for body in bodies]


class Wire:
    """A client of the Atropos wire at `url`; an async context manager.

    Args:
        tls: checks the server's certificate; None: by the authorities of this machine.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        self.url = url
        self._tls = tls

    def _session(self, *, auto_decompress: bool = True) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=self._tls or True)
        return aiohttp.ClientSession(connector=connector, auto_decompress=auto_decompress)

    async def __aenter__(self) -> Wire:
        self._kept = self._session(auto_decompress=False)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._kept.close()

    async def start(self, batch_size: int) -> None:
        """A fresh run: everything that waited is gone."""
        await self.get("/reset_data")
        await self._post(
            "/register",
            {
                "wandb_group": "group",
                "wandb_project": "project",
                "batch_size": batch_size,
                "max_token_len": 4096,
                "checkpoint_dir": "",
                "save_checkpoint_interval": 0,
                "starting_step": 0,
                "num_steps": 10**6,
            },
        )
        await self.get("/batch")

    async def add_environment(self, group_size: int) -> int:
        """The number of a new environment."""
        answer = await self._post(
            "/register-env",
            {
                "max_token_length": 4096,
                "desired_name": "bench",
                "weight": 1.0,
                "group_size": group_size,
            },
        )
        return int(answer["env_id"])

    async def post_all(self, bodies: Sequence[bytes], count: int, path: str) -> None:
        """`count` posts, each with the next of `bodies` (gzip), which come again and again."""
        numbers = iter(range(count))

        async def environment() -> None:
            for number in numbers:
                await self._post_gzip(path, bodies[number % len(bodies)])

        await asyncio.gather(*[environment() for _ in range(AT_A_TIME)])

    async def _post_gzip(self, path: str, body: bytes) -> None:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        async with (
            self._session() as session,
            session.post(self.url + path, data=body, headers=headers) as answer,
        ):
            answer.raise_for_status()
            await answer.read()

    async def join(self) -> None:
        """Registers as an environment on another machine, whose groups are packed."""
        body = {
            "name": ENVIRONMENT,
            "instance": "instance",
            "env": ENVIRONMENT,
            "split": "train",
            "seed": 0,
            "group_size": 1,
        }
        welcome = await self._post("/v1/environments", body)
        self._joined = f"{self.url}/v1/environments/{welcome['id']}/groups"
        self._headers = {KEY_HEADER: welcome["key"], "content-type": batch.GROUP_LIST_MSGPACK}

    async def post_packed(self, bodies: Sequence[bytes], at_once: int) -> None:
        """Posts `bodies`, so many in each request, over connections that are kept, as `envserver
        join` does when they are ready together.
        """
        waiting = iter(range(0, len(bodies), at_once))

        async def environment(session: aiohttp.ClientSession) -> None:
            for first in waiting:
                post = batch.encode_batch(bodies[first : first + at_once])
                async with session.post(self._joined, data=post, headers=self._headers) as answer:
                    answer.raise_for_status()
                    if (await answer.json())["refused"]:
                        raise RuntimeError("a group was refused")

        async with self._session() as session:
            await asyncio.gather(*[environment(session) for _ in range(AT_A_TIME)])

    async def fetch(self) -> bytes:
        """A batch as it comes, gzip."""
        headers = {"accept-encoding": "gzip, deflate"}
        async with self._kept.get(self.url + "/batch", headers=headers) as answer:
            answer.raise_for_status()
            return await answer.read()

    async def get(self, path: str) -> bytes:
        """The answer to a GET."""
        async with self._kept.get(self.url + path) as answer:
            answer.raise_for_status()
            return await answer.read()

    async def status_env(self, env_id: int) -> None:
        """What environments ask ten times a second."""
        async with self._kept.get(self.url + "/status-env", json={"env_id": env_id}) as answer:
            answer.raise_for_status()
            await answer.read()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._kept.post(self.url + path, json=body) as answer:
            answer.raise_for_status()
            found: dict[str, Any] = await answer.json(content_type=None)
            return found


def sequences_in(batch: bytes) -> int:
    """Of a fetched batch; raises when its gzip is not whole or it holds no batch."""
    stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
    text = stream.decompress(batch)
    if not stream.eof or stream.unused_data:
        raise ValueError("the answer is not a complete gzip stream")
    return sum(len(group["tokens"]) for group in json.loads(text)["batch"])

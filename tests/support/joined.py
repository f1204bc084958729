"""An environment on another machine, as its server sees it: registers and posts what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from envserver_records.records import Group, pack
from envserver_records.sampling import SamplingSpan

from envserver.remote import GROUP_LIST_MSGPACK
from envserver.remote.batch import encode_batch
from envserver.rollouts import group_id
from support.api import Api, native_group

GROUP = {"content-type": "application/vnd.envserver.group+msgpack"}


class Joined:
    """A session; made by `join`."""

    def __init__(self, api: Api, welcome: dict[str, Any]) -> None:
        self.api = api
        self.id, self.seed = welcome["id"], welcome["seed"]
        self.stored = welcome["stored"]
        self.key = {"x-environment-key": welcome["key"]}
        self.news: dict[str, Any] | None = None

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = self.key | more.pop("headers", {})
        return await self.api.http.request(
            method, f"/v1/environments/{self.id}{path}", headers=headers, **more
        )

    async def beat(self, **facts: Any) -> dict[str, Any]:
        """A heartbeat that knows what the one before was told; the news."""
        body = {"capacity": 9, "seen": self.news} | facts
        answer = await self.send("POST", "/heartbeat", json=body)
        assert answer.status_code == 200, answer.text
        self.news = answer.json()
        return dict(self.news)

    async def put(self, *indices: int, status: int = 200) -> None:
        """Posts these groups of its stream; all are answered with `status`."""
        for index in indices:
            answer = await self.post(pack(self.group(index)))
            assert answer.status_code == status, answer.text

    async def post(self, body: bytes) -> httpx.Response:
        return await self.send("POST", "/groups", content=body, headers=GROUP)

    async def post_all(self, bodies: Sequence[bytes]) -> list[tuple[int, str]]:
        """Posts them in one request; index and place of the refused ones."""
        headers = {"content-type": GROUP_LIST_MSGPACK}
        answer = await self.send("POST", "/groups", content=encode_batch(bodies), headers=headers)
        assert answer.status_code == 200, answer.text
        return [(said["index"], said["place"]) for said in answer.json()["refused"]]

    def group(self, index: int, **changes: Any) -> Group:
        """The group at `index` of its stream."""
        return stream_group(index, self.seed, **changes)


def stream_group(index: int, seed: int = 0, **changes: Any) -> Group:
    """The group at `index` of a stream of math."""
    group = native_group(group_id(f"math-train-{seed}-", index, "task-1"), **changes)
    group.index, group.seed = index, seed
    return group


async def join(api: Api, name: str = "math@one", place: str = "", **changes: Any) -> Joined:
    """Registers; `place`: parameters of the address."""
    answer = await api.http.post(f"/v1/environments{place}", json=registration(name, **changes))
    assert answer.status_code == 201, answer.text
    return Joined(api, answer.json())


def registration(name: str = "math@one", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "instance": f"the secret of {name}",
        "env": "math",
        "split": "train",
        "seed": 0,
        "group_size": 2,
    } | changes


def spoiled(**columns: Any) -> bytes:
    """A packed group whose first row has other columns."""
    group = stream_group(0)
    for name, values in columns.items():
        dtype = np.float32 if name == "logprobs" else np.uint8 if name == "mask" else np.int32
        setattr(group.trajectories[0].sequences[0], name, np.array(values, dtype))
    return pack(group)


def sampled(*spans: SamplingSpan) -> bytes:
    """A packed group whose first row of five tokens was sampled so."""
    group = stream_group(0)
    group.trajectories[0].sequences[0].sampling = list(spans)
    return pack(group)

"""The trainer API on a real store and a real port, in this process or in one that can be killed."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from envserver_records.records import Group, Json, Score, Sequence, Task, Usage, pack
from envserver_records.sampling import SamplingSpan

from envserver import ServerConfig
from envserver.api.app import create_api
from envserver.http.server import serve_api
from envserver.rollouts.stream import GroupRequest
from envserver.rollouts.stream import group_id as group_id_of
from envserver.runners.messages import GROUP_LIST_MSGPACK, encode_batch
from envserver.store import Store, open_store
from envserver.store.demand import put_of

from .records import sequence as row_of
from .records import trajectory
from .waiting import PATIENCE

REGISTRATION = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 4,
    "max_token_len": 512,
    "checkpoint_dir": "/checkpoints",
    "save_checkpoint_interval": 10,
    "starting_step": 3,
    "num_steps": 100,
}
GROUP = {"content-type": "application/vnd.envserver.group+msgpack"}
ENVIRONMENT = {"max_token_length": 100, "desired_name": "env", "weight": 1.0, "group_size": 2}
KEYS = [
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id"),
    *("distill_token_ids", "distill_logprobs"),
]


@dataclass
class Api:
    """A served API: `http` speaks to it, `store` is below it."""

    http: httpx.AsyncClient
    store: Store
    url: str

    async def get(self, path: str, **more: Any) -> Any:
        """The JSON of a GET that succeeds."""
        return _good(await self.http.request("GET", path, **more))

    async def post(self, path: str, body: Any, **more: Any) -> Any:
        """The JSON of a POST that succeeds."""
        return _good(await self.http.post(path, json=body, **more))

    async def status(self, method: str, path: str, **more: Any) -> int:
        return (await self.http.request(method, path, **more)).status_code

    # Trainers of our own API

    async def put(
        self, *group_ids: str, trajectories: int = 2, truncated: bool = False, **changes: Any
    ) -> None:
        """Stores groups of our own environments; `changes` go to each group."""
        for group_id in group_ids:
            group = native_group(group_id, trajectories, truncated=truncated)
            await put_native(self.store, msgspec.structs.replace(group, **changes))

    async def run(self, name: str = "run", **wanted: Any) -> Any:
        """A run that is made, or resumed."""
        answer = await self.http.post("/v1/runs", json={"name": name, **wanted})
        assert answer.is_success, answer.text
        return answer.json()

    async def lease(self, run: str = "run", key: str = "", **wanted: Any) -> Any:
        """The lease; one without an id or groups where nothing came."""
        headers = {"idempotency-key": key} if key else {}
        answer = await self.http.post(f"/v1/runs/{run}/lease", json=wanted, headers=headers)
        if answer.status_code == 204:
            return {"lease_id": "", "groups": []}
        return _good(answer)

    async def leased(self, run: str = "run", **wanted: Any) -> list[str]:
        """The ids of the groups of the next lease."""
        return [group["group_id"] for group in (await self.lease(run, **wanted))["groups"]]

    async def end(self, what: str, lease: Any, run: str = "run", **more: Any) -> int:
        """The status of an ack, nack or extend of a lease."""
        body = {"lease_id": lease["lease_id"], **more}
        return await self.status("POST", f"/v1/runs/{run}/{what}", json=body)

    # Trainers and environments of the Atropos API

    async def register(self, **changes: Any) -> None:
        """Registers a trainer."""
        await self.post("/register", REGISTRATION | changes)

    async def start(self, **changes: Any) -> None:
        """Registers a trainer and lets it ask for a batch, so that environments may register."""
        await self.register(**changes)
        await self.get("/batch")

    async def add_environment(self, **changes: Any) -> int:
        """The number of a newly registered environment."""
        answer = await self.post("/register-env", ENVIRONMENT | changes)
        assert answer["status"] == "success", answer
        return int(answer["env_id"])

    async def batch_marks(self) -> list[int] | None:
        """The marks of the groups of the next batch."""
        batch = (await self.get("/batch"))["batch"]
        return None if batch is None else [mark_of(group) for group in batch]


def _good(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, (answer.status_code, answer.text)
    return answer.json()


async def head_or_answer(
    http: httpx.AsyncClient, method: str, path: str, **more: Any
) -> httpx.Response:
    """The answer; of a stream of events, which has no end, only the status and the headers."""
    async with http.stream(method, path, **more) as answer:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            await answer.aread()
        return answer


@asynccontextmanager
async def running_api(
    place: Path | str,
    *,
    server: Json | None = None,
    clock: Callable[[], float] | None = None,
    **more: Any,
) -> AsyncIterator[Api]:
    """The API over the store at `place`, at the port in `server` or a free one; `more` goes to
    `create_api`."""
    settings = ServerConfig(**({"port": 0} | (server or {})))
    async with open_store(place, clock=clock) as store:
        app = create_api(store, settings=settings, **more)
        async with (
            await serve_api(app, "127.0.0.1", settings.port, settings) as running,
            httpx.AsyncClient(base_url=running.url, timeout=PATIENCE) as http,
        ):
            yield Api(http, store, running.url)


@contextlib.contextmanager
def api_process(place: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The same as a process of its own, until it is killed; it answers when this returns."""
    command = [sys.executable, "-m", "support.api", str(place.resolve()), str(port)]
    folder = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"serving\n"
            yield process
        finally:
            process.kill()


def wire_group(rows: int = 2, mark: int = 0, **fields: Any) -> Json:
    """A group of the Atropos API; `mark` is the first token of each row."""
    return {
        "tokens": [[mark, 5, 6]] * rows,
        "masks": [[-100, 5, 6]] * rows,
        "scores": [0.5] * rows,
    } | fields


def mark_of(group: Json) -> int:
    return int(group["tokens"][0][0])


def native_group(group_id: str, trajectories: int = 2, **changes: Any) -> Group:
    """A group of one of our own environments; `changes` go to each trajectory."""
    return Group(
        group_id=group_id,
        index=0,
        env="math",
        task_id="task-1",
        split="train",
        trajectories=[
            trajectory(
                f"{group_id}-{number}",
                sequence(),
                **{"task_id": "task-1", "score": Score(reward=float(number % 2)), "usage": Usage()}
                | changes,
            )
            for number in range(trajectories)
        ],
        policy_version=7,
        generation_params={"temperature": 0.7},
    )


def requested(index: int, **changes: Any) -> GroupRequest:
    """What asks for the group "g0", "g1" ... of one of our own environments."""
    facts: Json = {"group_id": f"g{index}", "env": "math", "split": "train", "seed": 0}
    facts["task"] = Task(f"t{index}", {})
    return GroupRequest(index=index, **(facts | changes))


async def put_native(store: Store, group: Group) -> None:
    """Stores `group` as `envserver serve` does."""
    await store.put([put_of(group, pack(group))])


def sequence() -> Sequence:
    """Five tokens, the last three sampled."""
    row = row_of([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], 7)
    row.logprobs[2:] = -0.25, -0.5, -0.75
    return row


# An environment on another machine, as its server sees it


class Joined:
    """A session of one that registers and posts what it is told; made by `join`."""

    def __init__(self, api: Api, welcome: Json) -> None:
        self.api = api
        self.id, self.seed = welcome["id"], welcome["seed"]
        self.stored = welcome["stored"]
        self.key = {"x-environment-key": welcome["key"]}
        self.news: Json | None = None

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = self.key | more.pop("headers", {})
        return await self.api.http.request(
            method, f"/v1/environments/{self.id}{path}", headers=headers, **more
        )

    async def beat(self, **facts: Any) -> Json:
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

    async def post_all(self, bodies: list[bytes]) -> list[tuple[int, str]]:
        """Posts them in one request; index and place of the refused ones."""
        headers = {"content-type": GROUP_LIST_MSGPACK}
        answer = await self.send("POST", "/groups", content=encode_batch(bodies), headers=headers)
        assert answer.status_code == 200, answer.text
        return [(said["index"], said["place"]) for said in answer.json()["refused"]]

    def group(self, index: int, **changes: Any) -> Group:
        return stream_group(index, self.seed, **changes)


def stream_group(index: int, seed: int = 0, **changes: Any) -> Group:
    group = native_group(group_id_of(f"math-train-{seed}-", index, "task-1"), **changes)
    group.index, group.seed = index, seed
    return group


async def join(api: Api, name: str = "math@one", place: str = "", **changes: Any) -> Joined:
    """Registers; `place`: parameters of the address."""
    answer = await api.http.post(f"/v1/environments{place}", json=registration(name, **changes))
    assert answer.status_code == 201, answer.text
    return Joined(api, answer.json())


def registration(name: str = "math@one", **changes: Any) -> Json:
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


async def _serve_for_ever(place: str, port: str) -> None:
    async with running_api(place, server={"port": int(port)}):
        print("serving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve_for_ever(*sys.argv[1:]))

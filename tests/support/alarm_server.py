"""A server whose environments misbehave, so that its alarms are raised."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_records.tasks import Json

import envserver

from .waiting import PATIENCE, until

ZOO = Path(__file__).with_name("alarm_zoo.py")
AT_ONCE = {
    "fewest": 10,
    "no_trainer_minutes": 0.05,
    "no_rollout_minutes": 0,
    "paused_minutes": 0,
    "store_seconds": 1e-9,
    "disk_free_gb": 1e9,
}


class Alarms:
    """The alarms of a server, over HTTP."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.http, self.url = http, url

    async def texts(self) -> dict[str, str]:
        """The sentences of the active alarms, by name and environment."""
        await asyncio.sleep(0.1)  # it is asked again and again
        found = (await self.http.get("/v1/alarms")).raise_for_status().json()["alarms"]
        return {f"{one['name']} {one['environment'] or ''}".strip(): one["text"] for one in found}

    async def raised(self, **sentences: str) -> None:
        """Waits until each alarm was seen; `__` stands between a name and an environment."""
        missing = {name.replace("__", " "): form for name, form in sentences.items()}

        async def were_seen() -> bool:
            texts = await self.texts()
            for name in [*missing]:
                if re.search(missing[name], texts.get(name, "")):
                    del missing[name]
            return not missing

        try:
            await until(were_seen)
        except TimeoutError:
            pytest.fail(f"missing {missing}, there are {await self.texts()}")

    async def ended(self, *names: str) -> None:
        async def are_gone() -> bool:
            return not (await self.texts()).keys() & set(names)

        await until(are_gone)

    async def post(self, path: str, body: Json) -> Any:
        return (await self.http.post(path, json=body)).raise_for_status().json()


@asynccontextmanager
async def serving(
    folder: Path, *names: str, model: str | None = "sim", **settings: Any
) -> AsyncIterator[Alarms]:
    """A server with environments of the zoo."""
    sections: Json = {
        "sim": {"latency_seconds": 0.05, "openers": False, "solve_probability": 1},
        "env": {"group_size": 2, "max_turns": 30, "ensure_scores_are_not_same": False},
        "rollouts": {"max_concurrent": 12, "max_attempts": 1, "max_queued_groups": 1_000_000},
        "workers": {"processes": 1},
    }
    mix = [f"{ZOO}:{name}" for name in names]
    async with (
        envserver.aio.serve(
            mix if len(mix) > 1 else mix[0],
            model=model,
            alarms=AT_ONCE,
            **sections,
            **settings,
            store=str(folder / "groups.db"),
            server={"port": 0, "drain_seconds": 0},
        ) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http,
    ):
        yield Alarms(http, server.url)

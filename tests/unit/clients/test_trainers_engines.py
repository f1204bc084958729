"""A trainer's own engines behind a server: registered, paused, published with their versions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from envserver_clients.adapters.skyrl_training import use_server
from envserver_clients.adapters.trainers_engines import TrainersEngines
from envserver_records.errors import EngineRefused
from support.fleets import attributed, fleet_house, sampled_by, says, versioned_vllm


async def test_engines_get_calls_when_they_have_weights_and_tokens_carry_their_version(
    tmp_path: Path,
) -> None:
    async with versioned_vllm(3) as one, fleet_house(tmp_path / "s.db") as house:
        engines = TrainersEngines(house.api.url)
        await engines.pause()
        await engines.pause()
        waits = asyncio.create_task(house.ask(house.open("first")))
        await engines.publish([one.url.removeprefix("http://")], 3)
        call = await waits
        assert sampled_by(call) == 3 and set(attributed(call)) == {3}
        await engines.pause()
        second = asyncio.create_task(house.ask(house.open("second")))
        one.text = says(4)
        await engines.publish([one.url], 4)
        call = await second
        assert sampled_by(call) == 4 and set(attributed(call)) == {4}
        await engines.publish([one.url], None)  # the same weights
        assert (await house.api.get("/v1/policy"))["version"] == 4
        again = TrainersEngines(house.api.url, counts_on=True)  # a trainer that was restarted
        await again.publish([one.url], 1)
        assert (await house.api.get("/v1/policy"))["version"] == 5
        with pytest.raises(EngineRefused, match="version 2, and 5 is published"):
            await engines.publish([one.url], 2)


async def test_skyrls_client_pauses_the_server_before_its_engines_and_publishes_each_sync(
    tmp_path: Path,
) -> None:
    async with versioned_vllm(1) as one, fleet_house(tmp_path / "s.db") as house:

        async def paused() -> bool:
            return bool((await house.api.get("/v1/policy"))["paused"])

        class Client:
            """As SkyRL's `RemoteInferenceClient`."""

            server_urls = (one.url,)
            weight_version = 0

            async def pause_generation(self, clear_cache: bool = False) -> bool:
                return await paused()

            async def sleep(self, level: int = 2) -> bool:
                return await paused()

            def increment_weight_version(self) -> None:
                self.weight_version += 1

        client: Any = use_server(Client(), TrainersEngines(house.api.url))
        assert isinstance(client, Client)
        assert await client.pause_generation(clear_cache=True)
        await asyncio.to_thread(client.increment_weight_version)
        call = await house.ask(house.open("first"))
        assert set(attributed(call)) == {sampled_by(call)} == {1}
        assert await client.sleep(level=1)
        one.text = says(2)
        await asyncio.to_thread(client.increment_weight_version)
        policy = await house.api.get("/v1/policy")
        assert (policy["version"], policy["paused"]) == (2, False)
        assert [row["weights_version"] for row in await house.rows()] == [2]

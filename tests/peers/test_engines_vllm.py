"""A real vLLM is registered while a server runs; another engine under its name is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fleets import attributed, fleet_house, versioned_vllm
from support.vllm_server import VllmServer

pytestmark = pytest.mark.vllm


async def test_a_real_engine_comes_and_its_tokens_have_its_version(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    async with versioned_vllm(3) as stranger, fleet_house(tmp_path / "s.db") as house:
        await house.publish(3)
        row = await house.register(vllm_server.base_url, version=3, model="tiny", wait_seconds=60)
        assert (row["standing"], row["weights_version"]) == ("used", 3)
        problem = await house.register(stranger.url, status=409, version=3, wait_seconds=60)
        assert "It differs from the other engines: it can be called in mode" in problem["detail"]
        assert "it renders the same messages to other token ids" in problem["detail"]
        call = await house.ask(house.open("r"))
        assert call.exact and attributed(call) == [3]
        await house.tell(vllm_server.root_url, "pause")
        await house.tell(vllm_server.root_url, "resume", version=4)
        assert attributed(await house.ask(house.open("s"))) == [4]

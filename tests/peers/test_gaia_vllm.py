"""The agents of `gaia` on a real vLLM: an ordinary run is one sequence, exactly as sampled.

Its random model is held to a form, so that an answer means something.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from envserver_environments.gaia.agents import AgentOptions, solve
from support.sdk_house import SdkHouse, vllm_house
from support.vllm_server import VllmServer

from envserver import PublicTask

pytestmark = pytest.mark.vllm

STEPS = 3
CALLS = r'<tool_call>\{"name": "python", "arguments": \{"code": "[1-9] \+ [1-9]"\}\}</tool_call>'
FORMS = {
    "code": r"So: [a-z]{2,5}\n<code>\n[1-9] \+ [1-9]\n</code>",
    "tools": CALLS,
    "plain": CALLS,
}


@pytest.fixture(scope="module")
def house(vllm_server: VllmServer) -> Iterator[SdkHouse]:
    with vllm_house(f"{vllm_server.root_url}/v1", vllm_server.model) as house:
        yield house


@pytest.mark.parametrize("kind", FORMS)
def test_an_ordinary_run_is_one_sequence(
    house: SdkHouse, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    extra: dict[str, Any] = {"structured_outputs": {"regex": FORMS[kind]}, "seed": 5}
    task = PublicTask("one", {"question": "How much is it?"})
    with house.seat() as seat:
        run: Any = SimpleNamespace(
            base_url=f"{seat.url}/v1",
            api_key=seat.attempt.key,
            model=seat.model,
            deadline=time.time() + 900,
            log_action=lambda *step, **more: None,
        )
        rules = AgentOptions(agent=kind, max_steps=STEPS)  # type: ignore[arg-type]
        done = asyncio.run(solve(task, run, rules, extra=extra))
        print(seat.edges, [step["observation"] for step in done["steps"]])
        assert done["state"] == "max_steps"
        assert all(step["observation"].startswith("Value: ") for step in done["steps"])
        edge = "appended" if kind == "code" else "calls"
        assert seat.edges == ["root", edge, edge]
        assert len(seat.sequences) == 1
        seat.assert_exact()

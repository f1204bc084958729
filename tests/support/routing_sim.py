"""The simulated engine over HTTP as a mixture of experts: it tells routed experts as vLLM does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from envserver_records.experts import table_to_text

from envserver import SimConfig
from envserver.models import SimEngine, TextSolver
from envserver.models.sim.planner import Plan
from envserver.models.sim.server import sim_app
from support.beside import in_a_thread
from support.serving import serving

LAYERS, EACH = 3, 2
Json = dict[str, Any]


class _Answer:
    """An answer with routed experts: [:, :, 0] is the number of the call, [:, :, 1] the position
    of the token (modulo 256)."""

    def __init__(self, answer: Any, number: int, start: int) -> None:
        self._answer, self._number, self._start = answer, number, start

    def whole(self) -> Json:
        answer: Json = self._answer.whole()
        for choice in answer["choices"]:
            prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            if prompt is None:
                continue
            positions = np.arange(self._start, len(prompt) + len(choice["token_ids"]) - 1)
            table = np.zeros((len(positions), LAYERS, EACH), np.uint8)
            table[..., 0] = self._number
            table[..., 1] = (positions % 256)[:, None]
            choice["routed_experts"] = table_to_text(table)
        return answer


class RoutingSim(SimEngine):
    """Keeps in `starts` from which token on experts were asked for, call by call."""

    def __init__(self, solver: TextSolver) -> None:
        super().__init__(SimConfig(latency_seconds=0), solver)
        self.starts: list[int] = []
        self.url = ""

    def plan(self, path: str, body: Any, rollout_id: str = "") -> Plan:
        start = body.pop("routed_experts_prompt_start", 0)
        plan = super().plan(path, body, rollout_id)
        self.starts.append(start)
        answer: Any = _Answer(plan.answer, len(self.starts) % 256, start)
        return msgspec.structs.replace(plan, answer=answer)


@contextlib.contextmanager
def routing_sim(solver: TextSolver) -> Iterator[RoutingSim]:
    engine = RoutingSim(solver)
    with in_a_thread(lambda: serving(sim_app(engine))) as url:
        engine.url = f"{url}/v1"
        yield engine

"""Groups whose rows the simulated engine sampled, and that engine with a bent for trouble."""

import asyncio
from typing import Any

import msgspec
import numpy as np
from envserver_local.simulated.engine import SimEngine
from envserver_records.records import Group, Json, Sequence

from envserver import SimConfig
from envserver.models.engine import EngineRequest
from support.api import native_group
from support.records import sequence

PROMPT, SAMPLED = 9, 6


class Engine(SimEngine):
    """The simulated engine, with a bent for trouble.

    Args:
        processed: sampled logprobs are after the temperature.
        context: most tokens; `says` it: in its list of models, else only by refusing.
        fails: raised for every prompt that begins with id 13.
    """

    def __init__(
        self,
        processed: bool = False,
        context: int | None = None,
        says: bool = True,
        fails: Exception | None = None,
    ) -> None:
        super().__init__(SimConfig(latency_seconds=0))
        self.processed, self.context, self.says, self.fails = processed, context, says, fails
        self.in_flight = self.most_in_flight = self.asked = 0

    async def get(self, path: str) -> Json:
        answer = await super().get(path)
        answer["data"][0].pop("max_model_len")
        if self.says:
            answer["data"][0]["max_model_len"] = self.context
        return answer

    async def post(self, request: EngineRequest) -> Json:
        body = request.body
        assert body.get("temperature", 1.0) <= 2.0  # vLLM takes no higher one
        self.asked += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        if self.fails and body["prompt"][0] == 13:
            raise self.fails
        if self.context and len(body["prompt"]) >= self.context:
            body = body | {"prompt": [10**6]}  # the simulated engine has no such id
        answer = await super().post(msgspec.structs.replace(request, body=body))
        logprobs = answer["choices"][0].get("logprobs")
        if self.processed and logprobs and body.get("temperature", 1.0) != 1.0:
            logprobs["token_logprobs"] = [one - 2.0 for one in logprobs["token_logprobs"]]
        return answer


def sampled(seed: int, version: int = 7, **changes: Any) -> Sequence:
    """A sequence that the simulated engine sampled."""
    prompt = np.random.default_rng(seed).integers(20, 400, PROMPT).tolist()
    body = {"prompt": prompt, "max_tokens": SAMPLED, "logprobs": 0, "seed": seed}
    body["return_token_ids"] = True
    choice = SimEngine(SimConfig()).plan("/v1/completions", body).answer.whole()["choices"][0]
    assert len(choice["token_ids"]) == SAMPLED
    row = sequence(prompt + choice["token_ids"], [0] * PROMPT + [1] * SAMPLED, version)
    row.logprobs[PROMPT:] = choice["logprobs"]["token_logprobs"]
    return msgspec.structs.replace(row, **changes)


def group(name: str, *, temperature: float = 1.0, **changes: Any) -> Group:
    """A group of two rollouts, the second of two rows; `changes` go to each row."""
    made = native_group(name)
    made.generation_params = {"temperature": temperature, "top_p": 1.0}
    seed = sum(name.encode())
    for number, trajectory in enumerate(made.trajectories):
        rows = range(number + 1)
        trajectory.sequences = [sampled(seed + 10 * number + row, **changes) for row in rows]
    return made

"""What the tests of the simulated engine share: one question, its demonstration, ways to ask."""

import json
from typing import Any

from envserver_local.simulated.engine import SimEngine
from envserver_local.simulated.policy import TextSolver
from envserver_local.simulated.tokenizer import shared_tokenizer
from envserver_records.tasks import Json

from envserver import SimConfig
from envserver.models.engine import EngineRequest

TOKENIZER = shared_tokenizer()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = "A box holds 12 pencils. How many do three boxes hold?"
EXACT = {"return_token_ids": True, "logprobs": True}


def tool(name: str, **properties: Any) -> Json:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("calculate", expression={"type": "string"}),
    tool("finish", answer={"type": "string"}),
]


def call(name: str, arguments: Any) -> Json:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": "call_1", "type": "function", "function": function}


def said(content: str | None, *calls: Json) -> Json:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


DEMONSTRATION = [
    said(None, call("calculate", {"expression": "3 * 12"})),
    said("The product is known.", call("finish", {"answer": "36"})),
]


def engine(turns: list[Json] | None = None, **config: Any) -> SimEngine:
    """An engine without latency that knows one question, if `turns` are given."""
    solver = TextSolver([(QUESTION, turns)]) if turns else None
    return SimEngine(SimConfig(latency_seconds=0, **config), solver)


async def post(sim: SimEngine, body: Json, *, rollout_id: str = "", path: str = CHAT) -> Json:
    return await sim.post(EngineRequest(path, body, rollout_id, 30))


def user(text: str = QUESTION) -> list[Json]:
    return [{"role": "user", "content": text}]


def ask(text: str = QUESTION, **fields: Any) -> Json:
    return {"model": "sim", "messages": user(text), **EXACT, **fields}


def logprobs_of(choice: Json) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]

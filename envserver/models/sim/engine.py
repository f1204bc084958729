"""The simulated engine: vLLM's endpoints without a model, for tests, load and demos.

In: request bodies of vLLM. Out: vLLM's answers, with real token ids and consistent logprobs; a
script (policy.py) makes the text. Answers are recognisable: the model is called "sim", owned by
"envserver-simulated", and their `system_fingerprint` is "envserver-sim".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from envserver_records.errors import EngineGarbage, EngineTimeout, EngineUnavailable

from ... import __version__
from ...config import SimConfig
from ..engine import ReplicaHealth
from .answers import MODEL
from .conversation import refusal
from .planner import Json, Plan, Planner
from .policy import Policy, Speaker
from .solver import Solver
from .tokenizer import SimTokenizer, shared_tokenizer
from .transcript import Transcript

OWNER = "envserver-simulated"
_BROKE = "The simulated engine broke off in the middle, as its disconnect_rate asks."


class SimEngine:
    """An Engine in this process; `server.py` serves it over HTTP.

    Over HTTP requests are independent, so whether a task is solved is drawn per request; in process
    it is drawn per rollout. Only the last turn of a demonstration can be spoiled, so both solve
    tasks equally often.

    Args:
        config: see SimConfig.
        solver: source of right answers; without one the answers are arbitrary text.
        speaker: says the answers instead of the script, which then has no part in them.

    Raises:
        ConfigError: the transcript of `config` cannot be used.
    """

    kind = "sim"
    exact = True

    def __init__(
        self, config: SimConfig, solver: Solver | None = None, *, speaker: Speaker | None = None
    ) -> None:
        self._config = config
        self._started_at = int(time.time())
        self.tokenizer: SimTokenizer = shared_tokenizer()
        speaker = speaker or _speaker_of(config, solver)
        self._planner = Planner(config, speaker, self.tokenizer)

    async def __aenter__(self) -> SimEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def model_name(self) -> str:
        return MODEL

    async def health(self) -> list[ReplicaHealth]:
        return self.replicas()

    def replicas(self) -> list[ReplicaHealth]:
        return [ReplicaHealth("sim", healthy=True)]

    async def get(self, path: str) -> Json:
        """See Engine. /v1/models, /version and /health."""
        if path == "/v1/models":
            return {"object": "list", "data": [self._card()]}
        if path == "/version":
            return {"version": f"envserver-sim {__version__}"}
        if path == "/health":
            return {}
        raise refusal(f"There is no {path}.", status=404)

    async def post(
        self,
        path: str,
        body: Json,
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> Json:
        """See Engine. `stream` in the body is ignored."""
        deadline = _now() + timeout_seconds
        plan = self.plan(path, {**body, "stream": False, "stream_options": None}, rollout_id)
        await self._before(plan, deadline)
        await _until(deadline, self.token_seconds(plan.tokens))
        if plan.fault == "disconnect":
            raise EngineGarbage(_BROKE)
        return plan.answer.whole()

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        body: Json,
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> AsyncIterator[AsyncIterator[Json]]:
        deadline = _now() + timeout_seconds
        plan = self.plan(path, {**body, "stream": True}, rollout_id)
        await self._before(plan, deadline)
        yield self._streamed(plan, deadline)

    def plan(self, path: str, body: Any, rollout_id: str = "") -> Plan:
        """Returns the answer to a POST at once, without waiting.
        Raises EngineRefused: the request is wrong; `detail` holds `status` and `param`.
        """
        return self._planner.plan(path, body, rollout_id)

    @property
    def latency_seconds(self) -> float:
        """Returns the seconds before the first token."""
        return self._config.latency_seconds

    def token_seconds(self, count: int) -> float:
        """Returns the seconds for `count` tokens."""
        return count * self._config.seconds_per_token

    async def _before(self, plan: Plan, deadline: float) -> None:
        await _until(deadline, self.latency_seconds)
        if plan.fault == "error":
            raise EngineUnavailable(
                "The simulated engine failed, as its error_rate asks.", status=500
            )

    async def _streamed(self, plan: Plan, deadline: float) -> AsyncIterator[Json]:
        for chunk in plan.chunks():
            if chunk is None:
                raise EngineGarbage(_BROKE)
            await _until(deadline, self.token_seconds(1))
            yield chunk

    def _card(self) -> Json:
        return {
            "id": MODEL,
            "object": "model",
            "created": self._started_at,
            "owned_by": OWNER,
            "root": MODEL,
            "parent": None,
            "max_model_len": self._config.context_tokens,
            "permission": [],
        }


def _speaker_of(config: SimConfig, solver: Solver | None) -> Speaker:
    if config.transcript is not None:
        return Transcript.read(config.transcript)
    return Policy(config, solver)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _until(deadline: float, seconds: float) -> None:
    """Waits `seconds`, and yields to the event loop in any case."""
    left = deadline - _now()
    await asyncio.sleep(max(0.0, min(seconds, left)))
    if seconds > left:
        raise EngineTimeout("The simulated engine had no answer in time.")

"""The simulated engine: vLLM's endpoints without a model, for tests, load and demos.

Answers have real token ids and consistent logprobs; a script (policy.py) makes the text. They are
recognisable: the model is called "sim", owned by "envserver-simulated", and their
`system_fingerprint` is "envserver-sim".
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.errors import (
    ConfigError,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from envserver_records.records import Json, Message

from envserver.models.engine import EngineRequest, ReplicaHealth
from envserver.settings.config import SimConfig
from envserver.version import __version__

from .answers import MODEL, Plan, Planner
from .policy import Policy, Said, Solver, Speaker, Wish, without_specials
from .tokenizer import (
    Conversation,
    SimTokenizer,
    assistant_text,
    plain_messages,
    refusal,
    shared_tokenizer,
)

_REMEMBERED_ROLLOUTS = 16_384
_SHOWN = 80
_AGENT = re.compile(r"(-r\d+)/\w+(\|\d+)$")
"""The end of a declared agent's fate: GROUP-rNUMBER/AGENT|CHOICE."""

Opening = tuple[tuple[str, str], ...]


class Recording(msgspec.Struct, frozen=True):
    rollout: str
    answers: list[str]


class Transcript:
    """Recorded conversations by their opening.

    A rollout plays one recorded rollout, all its agents included, from the first to the last turn;
    rollouts with the same opening take those recorded in turn. Requests without a rollout go on
    with a recording that has said the same so far.

    Args:
        conversations: each with its rollout, and with text contents as `plain_messages` gives them.
    """

    def __init__(self, conversations: Iterable[tuple[str, list[Message]]]) -> None:
        self._recordings: dict[Opening, list[Recording]] = {}
        for rollout, messages in conversations:
            answers = _answers(messages)
            if answers:
                for key in _keys(messages):
                    recording = Recording(rollout, answers)
                    self._recordings.setdefault(key, []).append(recording)
        self._next: Counter[Opening] = Counter()
        self._playing: OrderedDict[str, tuple[str, dict[Opening, Recording]]] = OrderedDict()

    @classmethod
    def read(cls, path: Path) -> Transcript:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The transcript {str(path)!r} cannot be read: {error}.") from error
        transcript = cls(_conversations(text, path))
        if not transcript._recordings:
            raise ConfigError(
                f"The transcript {str(path)!r} holds no conversation with an answer.",
                hint="Give a file of `process`, or JSONL with `messages` in each line.",
            )
        return transcript

    def say(self, conversation: Conversation, wish: Wish, *, fate: str, key: str) -> Said:
        keys = _keys(conversation.messages)
        opening = next((key for key in keys if key in self._recordings), None)
        if opening is None:
            last = conversation.messages[-1]["content"][:_SHOWN]
            raise refusal(f"The transcript has no conversation that begins like this: {last!r}.")
        turn = conversation.turn()
        if wish.rollout_id:
            answers = self._of_rollout(_AGENT.sub(r"\1\2", fate), opening).answers
        else:
            answers = self._of_nobody(opening, conversation, turn).answers
        if turn >= len(answers):
            raise refusal(f"The recorded conversation has no turn {turn + 1}.")
        return Said(without_specials(answers[turn]))

    def _of_rollout(self, rollout: str, opening: Opening) -> Recording:
        """What this rollout plays after `opening`, always the same."""
        if rollout not in self._playing:
            self._playing[rollout] = (self._taken(opening).rollout, {})
            if len(self._playing) > _REMEMBERED_ROLLOUTS:
                self._playing.popitem(last=False)
        recorded, chosen = self._playing[rollout]
        if opening not in chosen:
            same = [
                recording
                for recording in self._recordings[opening]
                if recording.rollout == recorded
            ]
            chosen[opening] = same[0] if same else self._taken(opening)
        return chosen[opening]

    def _of_nobody(self, opening: Opening, conversation: Conversation, turn: int) -> Recording:
        """A recording that begins as this conversation does."""
        if not turn:
            return self._taken(opening)
        so_far = _answers(conversation.messages)
        recordings = self._recordings[opening]
        same = (recording for recording in recordings if recording.answers[:turn] == so_far)
        return max(same, key=lambda recording: len(recording.answers), default=recordings[0])

    def _taken(self, opening: Opening) -> Recording:
        """The recordings of an opening in turn."""
        recordings = self._recordings[opening]
        self._next[opening] += 1
        return recordings[(self._next[opening] - 1) % len(recordings)]


def _keys(messages: list[Message]) -> Iterator[Opening]:
    """The opening with and without system messages, which may hold the time or the tools."""
    opening = []
    for message in messages:
        if message["role"] == "assistant":
            break
        opening.append((message["role"], message["content"].strip()))
    yield tuple(opening)
    without = tuple(message for message in opening if message[0] != "system")
    if len(without) < len(opening):
        yield without


def _answers(messages: list[Message]) -> list[str]:
    return [assistant_text(message) for message in messages if message["role"] == "assistant"]


def _conversations(text: str, path: Path) -> Iterator[tuple[str, list[Message]]]:
    for place, document in _documents(text, path):
        for number, (rollout, messages) in enumerate(_messages_in(document)):
            try:
                yield rollout or f"{place}, {number}", plain_messages(messages)
            except (EngineRefused, AttributeError) as error:
                raise ConfigError(f"{place}: a conversation cannot be read: {error}") from error


def _documents(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """The JSON documents with their places: the whole file, or else its lines."""
    try:
        yield str(path), json.loads(text)
        return
    except ValueError:
        pass
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield place, json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{place}: it is not JSON: {error}.") from error


def _messages_in(document: Any) -> Iterator[tuple[str, list[Message]]]:
    """The conversations of a group, of a unified trajectory or of a plain row, each with the
    rollout that it belongs to ("" if there is none)."""
    if not isinstance(document, dict):
        return
    held = document.get("messages")
    held = held if isinstance(held, list) else []
    rollouts = (document.get("envserver") or {}).get("rollouts") or []
    for rollout in rollouts:
        # A row has its agent's conversation, and so may several rows, and `others`.
        own = [held[row] for row in rollout["rows"] if row < len(held)]
        others = [other["messages"] for other in rollout.get("others") or ()]
        distinct = {json.dumps(talk): talk for talk in (*own, *others) if talk}
        yield from ((str(rollout["rollout_id"]), talk) for talk in distinct.values())
    if not rollouts:
        yield from (("", talk) for talk in held if isinstance(talk, list) and talk)
    if held and isinstance(held[0], dict):
        yield "", held
    for agent in (document.get("metadata") or {}).get("sequences") or ():
        if agent.get("messages"):
            yield "the rollout of the document", agent["messages"]


OWNER = "envserver-simulated"
FAILED = "The simulated engine failed, as its error_rate asks."
_BROKE = "The simulated engine disconnected in the middle, as its disconnect_rate asks."


class SimEngine:
    """An Engine in this process; `server.py` serves it over HTTP.

    Over HTTP requests are independent, so whether a task is solved is drawn per request; in process
    it is drawn per rollout. Only the last turn of a demonstration can be spoiled, so both solve
    tasks equally often.

    Args:
        solver: source of right answers; without one the answers are arbitrary text.
        speaker: says the answers instead of the script.
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
        if path == "/v1/models":
            return {"object": "list", "data": [self._card()]}
        if path == "/version":
            return {"version": f"envserver-sim {__version__}"}
        if path == "/health":
            return {}
        raise refusal(f"There is no {path}.", status=404)

    async def post(self, request: EngineRequest) -> Json:
        """Ignores `stream` in the body."""
        deadline = _now() + request.timeout_seconds
        body = {**request.body, "stream": False, "stream_options": None}
        plan = self.plan(request.path, body, request.rollout_id)
        await self._before(plan, deadline)
        await _until(deadline, self.token_seconds(plan.tokens))
        if plan.fault == "disconnect":
            raise EngineGarbage(_BROKE)
        return plan.answer.whole()

    @asynccontextmanager
    async def stream(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Json]]:
        deadline = _now() + request.timeout_seconds
        plan = self.plan(request.path, {**request.body, "stream": True}, request.rollout_id)
        await self._before(plan, deadline)
        yield self._streamed(plan, deadline)

    def plan(self, path: str, body: Any, rollout_id: str = "") -> Plan:
        return self._planner.plan(path, body, rollout_id)

    @property
    def latency_seconds(self) -> float:
        """Seconds before the first token."""
        return self._config.latency_seconds

    def token_seconds(self, count: int) -> float:
        return count * self._config.seconds_per_token

    async def _before(self, plan: Plan, deadline: float) -> None:
        await _until(deadline, self.latency_seconds)
        if plan.fault == "error":
            raise EngineUnavailable(FAILED, status=500)

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

"""What agents got is held against what was recorded, and that against what the engine itself said.

One `Bench` runs agents before a real vLLM; one `Proof` adds up what was compared. What must never
be is an AssertionError that names the agent's seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from envserver_records.records import Call, Json, Sequence, VersionSpan

from envserver import OpenAIConfig, TokensConfig
from envserver.models.engine import EngineRequest
from envserver.models.openai import OpenAIEngine
from envserver.models.probe import probe
from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.endpoint import Capabilities, EngineEndpoint, capabilities_of
from envserver.proxy.server import Proxy
from envserver.rollouts.audit import Rescorer
from envserver.settings.config import Mode
from envserver.tokens.builder import build
from envserver.tokens.chat_format import ChatFormat
from envserver.tokens.flags import DEFAULT, Actions
from envserver.tokens.invariants import check
from support.relay import Echo, Relay, relay
from support.serving import attempt_spec, serving
from support.speaking import Message, text_of
from support.token_agents import CHANGED, OWN, Agent, Boundary, Given
from support.vllm_server import VllmServer

from .waiting import PATIENCE

_RENDERED_SHARE = 10
"""One in so many of our renderings is compared with the engine's own."""

Sampled = tuple[bytes, bytes, bytes]
"""Ids of the prompt, ids and float32 logprobs of the completion."""


@dataclass
class Proof:
    """What was compared so far.

    Args:
        must_stitch: an answer that the agent did not change is always to be continued, unless
            there were tools.
        stitched: boundaries whose prompt is, token by token, what the model saw and sampled, and
            more; by edge.
        branched: boundaries that begin a new sequence, by reason.
        drifted: prompts that were to continue a call, and do not.
        text_drifted: of the stitched boundaries those at which the same messages, rendered as
            text, do not begin with the tokens of the answer's call.
        constrained: tokens whose logprobs a grammar or the like changed: they are not re-scored.
        unequal: re-scored tokens whose float32 logprob is not the same number, among the first
            `same_sums_tokens` of each row.
    """

    must_stitch: bool = True
    rollouts: int = 0
    calls: int = 0
    dialects: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    stitched: Counter[str] = field(default_factory=Counter)
    branched: Counter[str] = field(default_factory=Counter)
    drifted: int = 0
    text_drifted: int = 0
    own_ids: int = 0
    rendered: int = 0
    sequences: int = 0
    sampled: int = 0
    constrained: int = 0
    rescored: int = 0
    unequal: int = 0
    furthest: float = 0.0

    def table(self, title: str) -> str:
        lines = (f"  {name:20}{value}" for name, value in self.facts().items() if value)
        return "\n".join([title, *lines])

    def facts(self) -> Json:
        """The same for machines."""
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }


@dataclass
class Bench:
    """Agents, a proxy, a relay, the engine."""

    proxy: Proxy
    url: str
    echoes: Relay
    format: ChatFormat
    engine: OpenAIEngine
    http: aiohttp.ClientSession
    same_sums_tokens: int

    async def run(
        self, proof: Proof, seeds: Iterable[int], *, at_once: int, rows_at_once: int = 32
    ) -> list[Call]:
        """Rollouts of agents with these seeds, all that they leave checked and added to `proof`.

        Args:
            at_once: rollouts.
            rows_at_once: that are re-scored.

        Returns:
            What was recorded.
        """
        self.echoes.clear()
        places = asyncio.Semaphore(at_once)

        async def rollout(seed: int) -> Record:
            async with places:
                attempt = self.proxy.open(
                    attempt_spec(seconds=600.0, agents=["main", "helper", "critic"])
                )
                agent = Agent(self.http, f"{self.url}/r/{attempt.key}", seed, self.format.encode)
                await agent.run()
                return Record(seed, attempt, agent)

        records = await asyncio.gather(*map(rollout, seeds))
        await self._all_is_recorded()
        for record in records:
            self.proxy.seal(record.attempt)
            try:
                record.check(proof, self.format)
            except Exception as error:
                error.add_note(f"The agent's seed is {record.seed}.")
                raise
        calls = [call for record in records for call in record.calls]
        _compare(self.echoes, calls)
        await self._render(proof, calls)
        await self._rescore(proof, records, rows_at_once)
        return calls

    async def _all_is_recorded(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await asyncio.sleep(0.3)
            while self.proxy.gate.in_flight:
                await asyncio.sleep(0.05)

    async def _render(self, proof: Proof, calls: list[Call]) -> None:
        """Some of our renderings are the engine's own."""
        for call in [call for call in calls if call.planned_parent is not None][::_RENDERED_SHARE]:
            body: Json = {"model": "tiny", "messages": call.messages}
            body |= {"tools": call.tools} if call.tools else {}
            kwargs = _kwargs(call)
            body |= {"chat_template_kwargs": kwargs} if kwargs else {}
            path = "/v1/chat/completions/render"
            rendered = await self.engine.post(EngineRequest(path, body, "", 60))
            assert rendered["token_ids"] == self.format.prompt_ids(
                call.messages, call.tools, kwargs
            )
            proof.rendered += 1

    async def _rescore(self, proof: Proof, records: list[Record], at_once: int) -> None:
        places = asyncio.Semaphore(at_once)

        async def rescore(record: Record, row: Sequence) -> None:
            async with places:
                again = await Rescorer(self.engine).score(row.tokens)
            record.compare(proof, row, again, self.same_sums_tokens)

        await asyncio.gather(*(rescore(record, row) for record in records for row in record.rows))


@dataclass
class Record:
    """What one agent left."""

    seed: int
    attempt: ProxyAttempt
    agent: Agent
    rows: list[Sequence] = field(default_factory=list)

    @property
    def calls(self) -> list[Call]:
        return self.attempt.calls

    def check(self, proof: Proof, format: ChatFormat) -> None:
        """All that needs no engine."""
        calls = self.calls
        self.rows = build(calls, CONSTRAINED_TOO)
        check(calls, self.rows, CONSTRAINED_TOO)
        for call in calls:
            assert call.exact or call.finish_reason == "disconnect", call
            assert DEFAULT.worst(call.flags) != "drop", call.flags
            assert "render_mismatch" not in call.flags
            proof.drifted += call.planned_parent is not None and not _extends(
                call, calls[call.planned_parent]
            )
            proof.dialects[call.dialect] += 1
            by_string = isinstance(call.stop_reason, str)
            proof.ends["stop string" if by_string else call.finish_reason] += 1
        self._check_boundaries(proof, format)
        proof.rollouts += 1
        proof.calls += len(calls)
        proof.sequences += len(self.rows)
        proof.sampled += sum(len(call.completion_ids) for call in calls)
        proof.refused.update(_why(refused) for refused in self.agent.refused)

    def _check_boundaries(self, proof: Proof, format: ChatFormat) -> None:
        answers = defaultdict(list)
        for call in self.calls:
            if call.finish_reason != "disconnect":
                answers[call.body_digest, call.choice].append(call)
        claimed: set[int] = set()
        for boundary in self.agent.boundaries:
            before = _same(boundary.before, answers)
            after = next(c for c in _same(boundary.after, answers) if c.index not in claimed)
            claimed.add(after.index)
            if boundary.kind in OWN:
                self._check_own(proof, boundary, before, after)
            else:
                self._check_boundary(proof, boundary, before, after, format)

    def _check_own(self, proof: Proof, boundary: Boundary, before: list[Call], after: Call) -> None:
        extends = any(_extends(after, call) for call in before)
        assert extends or boundary.kind == "own_text"
        proof.own_ids += extends

    def _check_boundary(
        self, proof: Proof, boundary: Boundary, before: list[Call], after: Call, format: ChatFormat
    ) -> None:
        if after.planned_parent is None:
            kind = boundary.kind
            must = kind in ("plain", "stripped", "parts") and not after.tools and proof.must_stitch
            assert not must, f"{kind}, and yet not continued: {after.refusal}"
            proof.branched[kind if kind in CHANGED else after.refusal or "engine renders"] += 1
            return
        assert boundary.kind not in CHANGED, f"{boundary.kind}, and yet continued"
        parent = self.calls[after.planned_parent]
        assert parent in before or _is_twin(parent, before[0], after), "another answer is continued"
        _check_tail(parent, after, format)
        proof.stitched[after.edge] += 1
        text = format.prompt_ids(after.messages, after.tools, _kwargs(after))
        proof.text_drifted += text[: _end(parent)] != _seen(parent)

    def compare(
        self, proof: Proof, row: Sequence, again: np.ndarray, same_sums_tokens: int
    ) -> None:
        """The logprobs of a row, re-scored."""
        for index in row.path:
            call = self.calls[index]
            if "structured_output_masked" in call.flags:
                proof.constrained += len(call.completion_ids)
                continue
            scored = again[len(call.prompt_ids) : _end(call)]
            proof.rescored += len(scored)
            same_sums = max(0, same_sums_tokens - len(call.prompt_ids))
            proof.unequal += int((scored != call.logprobs)[:same_sums].sum())
            far = np.abs(scored - call.logprobs).max(initial=0.0)
            proof.furthest = max(proof.furthest, float(far))


CONSTRAINED_TOO = Actions({"structured_output_masked": "train"})
"""Keeps in the rows what a run masks by default."""


def _same(given: Given, answers: dict[tuple[bytes, int], list[Call]]) -> list[Call]:
    """The calls that gave the agent this answer: several where equal requests were answered
    equally."""
    said = _said(given.message)
    return [c for c in answers[given.digest, given.choice] if _said(c.message) == said]


def _is_twin(call: Call, before: Call, after: Call) -> bool:
    """Whether `call` answered the same request as `before`, and what the agent sent back reads as
    its answer too: nobody can tell them apart then."""
    replayed = after.messages[len(before.messages)]
    (text, calls), (sent, sent_calls) = _said(call.message), _said(replayed)
    return (
        (call.messages, call.tools, call.agent) == (before.messages, before.tools, before.agent)
        and "".join(sent.split()).startswith("".join(text.split()))
        and calls == sent_calls
    )


def _said(message: Message) -> Any:
    calls = [made["function"] for made in message.get("tool_calls") or []]
    return text_of(message), [(made["name"], _loaded(made["arguments"])) for made in calls]


def _loaded(arguments: str) -> Any:
    """A tool call's arguments; those that are not an object look like one in some dialects."""
    with contextlib.suppress(ValueError):
        loaded = json.loads(arguments)
        if isinstance(loaded, dict):
            return loaded
    return {"arguments": arguments}


def _check_tail(parent: Call, after: Call, format: ChatFormat) -> None:
    """Behind the answer stands what the template writes there, encoded as it is in the whole.

    It writes <|im_end|> and the end of the line, and then all that follows the answer.
    """
    at, kwargs = len(parent.messages), _kwargs(after)
    whole = format.prompt_text(after.messages, after.tools, kwargs)
    until = format.render(after.messages[: at + 1], after.tools, kwargs, generation_prompt=False)
    assert whole.startswith(until) and until.endswith("<|im_end|>\n")
    end = format.encode("<|im_end|>")[0]
    added = after.prompt_ids[_end(parent) :].tolist()
    # A sampled end that the engine gave as text, too, is content: the template's own stands behind.
    is_content = added[0] == end and text_of(after.messages[at]).endswith("<|im_end|>")
    if parent.completion_ids[-1] != end or is_content:
        added = added[added.index(end) + 1 :]
    behind = format.encode("\n" + whole[len(until) :])
    assert added == behind, "what stands behind the answer is not the template's"


def _kwargs(call: Call) -> Json:
    kwargs: Json = call.sampling.get("chat_template_kwargs") or {}
    return kwargs


def _seen(call: Call) -> list[int]:
    return [*call.prompt_ids.tolist(), *call.completion_ids.tolist()]


def _end(call: Call) -> int:
    return len(call.prompt_ids) + len(call.completion_ids)


def _extends(call: Call, parent: Call) -> bool:
    return call.prompt_ids[: _end(parent)].tolist() == _seen(parent)


def _why(refused: Exception) -> str:
    status, body = refused.args
    return f"{status} {body[:200]}"


def _compare(echoes: list[Echo], calls: list[Call]) -> None:
    """Every answer of the engine is one call, token by token; and it saw what it was sent."""
    for echo in echoes:
        assert echo.sent is None or echo.sent == echo.prompt_ids, "the engine saw something else"
    versions = defaultdict(list)
    for echo in echoes:
        versions[_of_echo(echo)].append(_versions(echo))
    said = Counter({sampled: len(told) for sampled, told in versions.items()})
    recorded = Counter(_of_call(call) for call in calls if call.finish_reason != "disconnect")
    unsaid = recorded - said
    assert not unsaid, f"recorded, and never said: {[*map(_told, unsaid.elements())]}"
    for call in calls:
        told = versions.get(_of_call(call), [])
        assert call.versions in told or None in told or call.finish_reason == "disconnect"
    left = said - recorded
    for call in calls:  # of a stream that the agent left there may be more than was recorded
        if call.finish_reason == "disconnect" and call.exact:
            prompt, ids, logprobs = _of_call(call)
            match = next(s for s in left if s[0] == prompt and s[1].startswith(ids))
            assert match[2].startswith(logprobs)
            left -= Counter([match])
    # And where nothing had arrived yet, there may be whole answers.
    hung_up = [c for c in calls if c.finish_reason == "disconnect"]
    most = sum(call.sampling.get("n", 1) for call in hung_up)
    assert left.total() <= most, f"not recorded: {[*map(_told, left.elements())]}"


def _versions(echo: Echo) -> list[VersionSpan] | None:
    """The versions that the engine told of; None where it told none, or none with a number."""
    spans = [(span["version"].rpartition("-")[2], span) for span in echo.versions]
    if not spans or not all(number.isdecimal() for number, _ in spans):
        return None
    return [VersionSpan(int(number), span["start"], span["end"]) for number, span in spans]


def _told(sampled: Sampled) -> str:
    prompt, ids, _ = (np.frombuffer(column, np.int32).tolist() for column in sampled)
    return f"{ids} behind {len(prompt)} tokens, {prompt[-20:]}"


def _of_echo(echo: Echo) -> Sampled:
    prompt, ids = (np.array(x, np.int32) for x in (echo.prompt_ids, echo.completion_ids))
    return prompt.tobytes(), ids.tobytes(), np.array(echo.logprobs, np.float32).tobytes()


def _of_call(call: Call) -> Sampled:
    return call.prompt_ids.tobytes(), call.completion_ids.tobytes(), call.logprobs.tobytes()


@asynccontextmanager
async def bench(
    server: VllmServer, *, mode: Mode = "auto", requests_at_once: int = 10_000
) -> AsyncIterator[Bench]:
    """A Bench before `server`, asked in `mode`."""
    tokens = TokensConfig(tokenizer=server.model_folder, constraints="all")
    with relay(server.root_url, at_once=requests_at_once) as (url, echoes):
        config = OpenAIConfig(base_url=f"{url}/v1", model_name=server.model)
        direct = OpenAIConfig(base_url=server.base_url, model_name=server.model)
        # No agent meets a connection that the server, idle for seconds, is about to close.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            OpenAIEngine(config) as engine,
            OpenAIEngine(direct) as scorer,
            aiohttp.ClientSession(connector=connector) as http,
        ):

            async def find() -> Capabilities:
                return capabilities_of(await probe(engine, wanted=mode, model=server.model), tokens)

            proxy = Proxy(engine, endpoint=EngineEndpoint(engine, find=find, tokens=tokens))
            async with serving(proxy.asgi()) as served:
                format = ChatFormat.load(server.model_folder)
                same_sums = await asyncio.to_thread(lambda: server.same_sums_tokens)
                yield Bench(proxy, served, echoes, format, scorer, http, same_sums)

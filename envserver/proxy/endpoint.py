"""An engine as the proxy uses it: its capabilities, its policy version, and prompt planning.

The capabilities are probed when the engine first answers; a server may start before its engine.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import structlog
from envserver_records.errors import ConfigError, EngineError, EngineRefused, EngineUnavailable
from envserver_records.records import Call, Message
from envserver_records.sampling import LogprobsKind
from envserver_records.waiting import Backoff

from ..models.catalogue import find_model_files, model_source, without_folders
from ..models.engine import Engine, count_as_waiting
from ..models.probe import ProbeResult
from ..settings.config import TokensConfig
from ..tokens.chat_format import ChatFormat, agreeing
from ..tokens.history import History, PromptPlan, same_prompt
from ..tokens.prepare import Refused, template_kwargs
from .asgi import retrieve
from .attempts import AgentRoute, ProxyAttempt
from .body import EngineBody, engine_body, without_strict
from .bounds import InFlight
from .dialects.base import ModelRequest
from .engine_client import EngineClient, EngineSession, TextClient, client_for
from .engine_client.base import ChatClient, has_media, has_only_images
from .engine_client.tokens import tokenized
from .gate import Gate

TOKEN_MODES = ("tokens", "completions")
"""Modes in which an engine takes token ids."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The capabilities of an engine.

    Args:
        format: the model's chat template and tokenizer; None: calls are not continued by ids.
        why_not: a sentence that says why there is no format, or "".
    """

    probe_result: ProbeResult
    format: ChatFormat | None = None
    folder: Path | None = None
    why_not: str = ""


def capabilities_of(
    probe_result: ProbeResult,
    tokens: TokensConfig,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Capabilities:
    """Returns the capabilities of an engine. Reads the model's files; may wait for the network.

    `template_kwargs`: the engine's default template variables; None: they are found.
    """
    if tokens.experts and not probe_result.routed_experts:
        raise no_experts()
    if not tokens.stitch:
        return Capabilities(probe_result=probe_result, why_not="tokens.stitch is off.")
    files = find_model_files(probe_result, tokens.tokenizer)
    if probe_result.mode not in TOKEN_MODES:
        why = f"In mode {probe_result.mode} the engine does not take token ids."
        return Capabilities(probe_result=probe_result, folder=files.folder, why_not=why)
    if files.folder is None:
        return Capabilities(probe_result=probe_result, why_not=files.reason)
    try:
        format = ChatFormat.load(files.folder)
    except ConfigError as error:
        return Capabilities(probe_result=probe_result, folder=files.folder, why_not=str(error))
    agreed, why = agreeing(format, probe_result.echoes, template_kwargs)
    return Capabilities(probe_result=probe_result, format=agreed, folder=files.folder, why_not=why)


def no_experts() -> ConfigError:
    return ConfigError(
        "tokens.experts is on, but this engine returns no routed experts.",
        hint="Start vLLM with --enable-return-routed-experts: for a mixture of experts, on a GPU.",
    )


VERSION_PLACEHOLDER = "{version}"
"""The policy version in a model's name, as in a LoRA adapter's: `policy@{version}`."""
_LONG_TEXT = 16_384
"""Characters above which a text is tokenised in a thread; it takes some milliseconds."""
_COUNT_SECONDS = 30.0
_MANY_MESSAGES = 128
"""Messages above which a prompt is planned in a thread: each is rendered several times."""

_TEXTS = TextClient()

_log = structlog.get_logger("envserver.proxy")


class ReadyEngine:
    """An engine with known capabilities; without any, only its chat API is used."""

    def __init__(
        self, engine: Engine, capabilities: Capabilities | None, tokens: TokensConfig
    ) -> None:
        probe_result = capabilities.probe_result if capabilities else None
        self.exact = engine.exact and (probe_result is None or probe_result.mode != "opaque")
        self.logprobs_kind: LogprobsKind = probe_result.logprobs if probe_result else "unknown"
        self.capabilities = capabilities
        self._engine = engine
        self._format = capabilities.format if capabilities and tokens.stitch else None
        self._tokens = tokens
        self._differs_at = ""
        """The first message that the engine rendered otherwise than we do."""
        self.counts = True
        """Whether the engine counts tokens, as far as is known."""
        self._planning = asyncio.Lock()
        """One long plan at a time: threads would only compete for the interpreter."""
        self._client: EngineClient = (
            ChatClient() if probe_result is None else client_for(probe_result, self._format)
        )

    @property
    def server(self) -> str:
        if self.capabilities is None:
            return self._engine.kind
        return self.capabilities.probe_result.server or self._engine.kind

    def described(self) -> dict[str, Any]:
        """Describes how the engine is called and prompts are rendered, for the record."""
        if self.capabilities is None:
            return {"mode": "chat" if self.exact else "opaque", "continues": False}
        facts: dict[str, Any] = {
            "server": self.capabilities.probe_result.server,
            "mode": self.capabilities.probe_result.mode,
            "continues": not self.capabilities.why_not,
        }
        if self.capabilities.why_not or self._format is None:
            return {**facts, "why_not": without_folders(self.capabilities.why_not)}
        return {
            **facts,
            **({"differs_at": self._differs_at} if self._differs_at else {}),
            "think": self._tokens.think,
            **({"template_kwargs": self._format.defaults} if self._format.defaults else {}),
            "template": self._format.template_digest,
            "tokenizer": self._format.tokenizer_digest,
            **({"processor": self._format.processor} if self._format.processor else {}),
        }

    def identity(self) -> dict[str, Any]:
        """Returns what the engine says of itself and of its model's files, without paths."""
        if self.capabilities is None:
            return {"server": self._engine.kind}
        probe_result = self.capabilities.probe_result
        source = model_source(probe_result.root, self.capabilities.folder)
        facts: dict[str, Any] = {"server": probe_result.server, **source}
        if probe_result.weights is not None:
            facts["weights"] = probe_result.weights
        if self._format is not None:
            facts["template"] = self._format.template_digest
            facts["tokenizer"] = self._format.tokenizer_digest
        return facts

    @property
    def image_token(self) -> int | None:
        return None if self._format is None else self._format.image_token

    def client(self, request: ModelRequest) -> EngineClient:
        return self._client if request.prompt is None else _TEXTS

    def body_for(self, request: ModelRequest, route: AgentRoute) -> tuple[ModelRequest, EngineBody]:
        """Returns the body for `request`, and the request as the engine gets it."""
        if self.exact and route.trained and self._tokens.strict_tools == "drop":
            request = without_strict(request)
        banned = () if self._format is None else self._format.banned
        body = engine_body(
            request, model=route.model, sampling=route.sampling, exact=self.exact, banned=banned
        )
        return request, body

    def folded(self, plan: PromptPlan) -> list[int] | None:
        """Returns the ids of a planned prompt with one token for each image; None: unknown."""
        if plan.ids is not None:
            ids: list[int] = plan.ids.tolist()
            return ids
        if plan.text is None or self._format is None:
            return None
        return self._format.encode(plan.text)

    @property
    def max_model_len(self) -> int | None:
        return self.capabilities.probe_result.max_model_len if self.capabilities else None

    async def count_prompt(
        self, attempt: ProxyAttempt, request: ModelRequest, body: dict[str, Any], agent: str | None
    ) -> int | None:
        """Returns the number of tokens of the prompt of `request`, if the engine can tell."""
        plan = await self.plan(attempt, request, body, agent)
        return await self.prompt_tokens(attempt, plan, body, agent)

    async def prompt_tokens(
        self, attempt: ProxyAttempt, plan: PromptPlan, body: dict[str, Any], agent: str | None
    ) -> int | None:
        """Returns the number of tokens of a planned prompt, if the engine can tell."""
        if plan.ids is not None and not plan.images:
            return len(plan.ids)
        if plan.text is not None and not plan.images and self._format is not None:
            if len(plan.text) <= _LONG_TEXT:
                return len(self._format.encode(plan.text))
            async with attempt.planning:
                await attempt.in_flight.may_read()
                return await asyncio.to_thread(_counted, self._format, plan.text, attempt.in_flight)
        seconds = min(_COUNT_SECONDS, max(0.0, attempt.seconds_left))
        session = EngineSession(self._engine, attempt.spec.routing_key(agent), seconds)
        return await tokenized(session, body)

    async def plan(
        self, attempt: ProxyAttempt, request: ModelRequest, body: dict[str, Any], agent: str | None
    ) -> PromptPlan:
        """Plans the prompt of `request`: continue a recorded call, or let the engine render it."""
        if request.prompt is not None:
            return PromptPlan()
        if has_media(body) and (self.image_token is None or not has_only_images(body)):
            return PromptPlan(flags=["multimodal_unstitched"])
        if self._format is None:
            return PromptPlan()
        try:
            kwargs = template_kwargs(body)
        except Refused as refused:
            return PromptPlan(refusal=refused.reason)
        history = attempt.histories.get(self)
        if history is None:
            history = attempt.histories[self] = History(
                self._format, edits=self._tokens.edits, think=self._tokens.think
            )
        plan = partial(
            history.plan,
            request.messages,
            request.tools,
            kwargs=kwargs,
            model=attempt.spec.route(agent).model,
            agent=agent,
        )
        if _takes_long(request.messages):
            async with attempt.planning, self._planning:  # rollouts take turns
                planned = await asyncio.to_thread(plan)
        else:
            planned = plan()
        refusal = self._client.can_continue(body) if planned.ids is not None else None
        return planned if refusal is None else planned.as_root(refusal)

    async def remember(self, attempt: ProxyAttempt, calls: list[Call], prompt: PromptPlan) -> None:
        history = attempt.histories.get(self)
        if history is None or self._format is None or prompt.text is None:
            return
        for call in calls:
            same = None
            if prompt.ids is None and len(prompt.text) > _LONG_TEXT:
                same = await asyncio.to_thread(
                    same_prompt, self._format, prompt, call.prompt_ids, call.images
                )
            history.add(call, prompt, same=same)
        if history.differs_at and not self._differs_at:
            self._differs_at = f"{history.differs_at} (rollout {attempt.spec.rollout_id})"
            _log.warning("render_mismatch", differs_at=self._differs_at)


def _counted(form: ChatFormat, text: str, in_flight: InFlight) -> int:
    with in_flight.reading():
        return len(form.encode(text))


def _takes_long(messages: list[Message]) -> bool:
    """Returns whether planning is too slow for the event loop; only new messages are tokenised."""
    new = takewhile(lambda message: message.get("role") != "assistant", reversed(messages))
    characters = sum(len(str(message.get("content"))) for message in new)
    return len(messages) > _MANY_MESSAGES or characters > _LONG_TEXT


def _ignore(routing_key: str) -> None: ...


async def _accept(routing_key: str) -> None: ...


class EngineEndpoint:
    """The engine behind a proxy.

    Args:
        find: probes the engine's capabilities once it answers; None: use its chat API only.
        tokens: settings for continuing calls, and for what agents may ask.
        gate: the engine's gate, if another endpoint of the same engine has one.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        find: Callable[[], Awaitable[Capabilities]] | None = None,
        tokens: TokensConfig | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.gate = gate or Gate()
        self.policy_version = -1
        self.names_versions = False
        """Whether the engine reports version numbers because its trainer names the weights."""
        self.begun: Callable[[str], None] = _ignore
        self.ended: Callable[[str], None] = _ignore
        """Called with a routing key before the first call with it, and after the last."""
        self.confirm: Callable[[str], Awaitable[None]] = _accept
        """Checks that the engine of a routing key is the same as before."""
        self.engine = engine
        self._find = find
        self.tokens = tokens or TokensConfig()
        self._ready = None if find else ReadyEngine(engine, None, self.tokens)
        self._finding: asyncio.Task[ReadyEngine] | None = None

    def pinned(self) -> EngineEndpoint:
        """Returns an endpoint that stays at the current policy version, for names that hold it."""
        other = copy.copy(self)
        other._finding = None
        return other

    @property
    def capabilities(self) -> Capabilities | None:
        """None until the engine has answered once."""
        return None if self._ready is None else self._ready.capabilities

    async def ready(self) -> ReadyEngine:
        """Returns the probed engine; concurrent requests share one probe."""
        if self._ready is not None:
            return self._ready
        if self._finding is None:
            self._finding = asyncio.create_task(self._found())
            self._finding.add_done_callback(retrieve)
        # A request that gives up must not cancel the probe for the others.
        return await asyncio.shield(self._finding)

    async def _found(self) -> ReadyEngine:
        try:
            capabilities = await self._find() if self._find else None
            self._ready = ReadyEngine(self.engine, capabilities, self.tokens)
            return self._ready
        finally:
            self._finding = None

    async def max_model_len(self) -> int | None:
        """Returns the model's context in tokens; None if the engine is away or does not say."""
        try:
            return (await self.ready()).max_model_len
        except (EngineError, ConfigError):
            return None

    @property
    def logprobs_kind(self) -> LogprobsKind:
        """Whether logprobs are from before the temperature; unknown until it answered."""
        return "unknown" if self._ready is None else self._ready.logprobs_kind

    def described(self) -> dict[str, Any]:
        return {} if self._ready is None else self._ready.described()

    def identity(self) -> dict[str, Any]:
        return {} if self._ready is None else self._ready.identity()

    def model(self, name: str) -> str:
        """Returns `name` with the policy version in its placeholder, if it has one."""
        return name.replace(VERSION_PLACEHOLDER, str(max(0, self.policy_version)))


# A LoRA adapter is missing for a moment after the engine was restarted (its trainer loads the
# adapters again), before the first version is published, or when a call waited so long for a slot
# that its version was removed. Such a call is sent again with the then current version's name; the
# rollout is not to blame.

PATIENCE_SECONDS = 60.0
_BACKOFF = Backoff(first_seconds=0.05, max_seconds=2.0)


class MissingVersion:
    """Decides when one call may be sent again."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._pauses = 0

    async def wait(self, error: EngineRefused, requested: str, now: str) -> None:
        """Returns when the call may be sent again, or raises.

        `asked`: the model name that the engine refused with `error`; `now`: that of the current
        version.
        """
        if error.detail.get("status") != HTTPStatus.NOT_FOUND:
            raise error
        if self._since is None:
            self._since = time.monotonic()
        if requested != now:
            return
        if time.monotonic() - self._since > PATIENCE_SECONDS:
            raise EngineUnavailable(
                f"The engine has no model {requested!r}: {error.message}",
                hint="A trainer must load it, with `envserver_clients.weights.Lora` or "
                "/v1/load_lora_adapter.",
            )
        self._pauses += 1
        with count_as_waiting():
            await asyncio.sleep(_BACKOFF.seconds(self._pauses))

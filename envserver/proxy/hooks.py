"""Runs the hooks of an environment between an agent and the engine.

The record keeps what the engine sampled, and beside it the message that the agent got; a later
prompt continues recorded tokens only if the agent sends back what the engine sampled. A hook that
raises is the environment's bug, and a ServiceError is not.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import msgspec
from envserver_records.errors import ConflictError, HookError, InputError, ServiceError
from envserver_records.records import Message
from envserver_records.timings import HookEvent

from ..environment import Environment
from ..rollout_interface import Caller, HookBug, ModelCall
from ..settings.config import TokensConfig
from ..tools.calling import place_of
from .attempts import ProxyAttempt
from .body import admit_images
from .dialects.base import ModelRequest
from .dialects.chat import chat_messages, chat_tools
from .dialects.conversation import check_media
from .engine_answer import EngineAnswer
from .services import ServiceRouter

HOOK_SECONDS = 60.0
"""Seconds after which a hook is cancelled, and the rollout retried."""
_MOST_REFUSED = 1000
_MOST_TRACEBACK = 8000

Hook = Callable[[ModelCall], Awaitable[None] | None]


class HookFunctions(msgspec.Struct, frozen=True):
    """The hooks of an environment; None: it lets everything through."""

    on_request: Hook | None
    on_answer: Hook | None


def hooks_of(environment: Environment) -> HookFunctions | None:
    kind = type(environment)
    functions = HookFunctions(
        None if kind.on_request is Environment.on_request else environment.on_request,
        None if kind.on_answer is Environment.on_answer else environment.on_answer,
    )
    return functions if functions.on_request or functions.on_answer else None


class Hooks:
    def __init__(self, functions: HookFunctions, services: ServiceRouter) -> None:
        self.on_request = functions.on_request
        self.on_answer = functions.on_answer
        self._services = services

    async def request(
        self,
        attempt: ProxyAttempt,
        request: ModelRequest,
        agent: str | None,
        tokens: TokensConfig,
    ) -> tuple[ModelRequest, HookEvent | None]:
        """Returns the request for the engine, and what the hook did to it."""
        assert self.on_request is not None
        call = await self._ran(self.on_request, attempt, request, agent)
        if call.refused:
            if len(attempt.refused_requests) < _MOST_REFUSED:
                event = HookEvent(at="request", reason=call.reason, agent=agent)
                attempt.refused_requests.append(event)
            attempt.flags.add("request_refused")
            raise attempt.reached("refused", call.reason, agent)
        if not call.changes:
            return request, None
        with _checking(attempt, "on_request"):
            changed = _changed_request(request, call, tokens)
            await admit_images(changed.messages, tokens, attempt.in_flight)
        return changed, _event("request", call, agent)

    async def answers(
        self,
        attempt: ProxyAttempt,
        request: ModelRequest,
        agent: str | None,
        answer: dict[str, Any],
        engine_answer: EngineAnswer,
    ) -> str | None:
        """Lets the hook see each choice; notes changes in both; returns why it refuses, if so."""
        assert self.on_answer is not None
        for choice, sampled in zip(answer["choices"], engine_answer.choices, strict=True):
            message = choice["message"]
            call = await self._ran(
                self.on_answer, attempt, request, agent, answer=message, choice=sampled.index
            )
            if call.refused:
                for refused in engine_answer.choices:
                    refused.returned = None
                    refused.hooked = HookEvent(at="answer", reason=call.reason, agent=agent)
                return call.reason
            if call.changes:
                with _checking(attempt, "on_answer"):
                    new = _changed_answer(call)
                # The record keeps the engine's message: `choice` gets another, not `sampled`.
                choice.update(_changed_choice(choice, new))
                choice.pop("token_ids", None)
                sampled.returned = new
                sampled.hooked = _event("answer", call, agent)
        return None

    async def _ran(
        self,
        hook: Hook,
        attempt: ProxyAttempt,
        request: ModelRequest,
        agent: str | None,
        *,
        answer: Message | None = None,
        choice: int = 0,
    ) -> ModelCall:
        """Runs `hook` on copies, and returns the call with what it did."""
        name = "on_request" if answer is None else "on_answer"
        try:
            async with asyncio.timeout(HOOK_SECONDS), AsyncExitStack() as stack:
                call = ModelCall(
                    caller=await self._caller(attempt, stack),
                    agent=agent,
                    messages=copy.deepcopy(request.messages),
                    tools=copy.deepcopy(request.tools),
                    prompt=copy.deepcopy(request.prompt),
                    answer=copy.deepcopy(answer),
                    choice=choice,
                )
                returned: object = hook(call)
                if inspect.isawaitable(returned):
                    returned = await returned
                if returned is not None and returned is not call:
                    raise TypeError(f"{returned!r:.50} was returned; {_EFFECTIVE}")
                return call
        except TimeoutError as error:
            failure = ServiceError(f"The environment's {name} did not finish in time: {error}.")
            attempt.service_failed(failure)
            raise failure from error
        except HookError:
            raise
        except ServiceError as error:
            attempt.service_failed(error)
            raise
        except (Exception, SystemExit) as error:
            if attempt.sealed and isinstance(error, ConflictError):
                raise  # it ended before the hook began
            raise _bug(attempt, name, error, hook) from error

    async def _caller(self, attempt: ProxyAttempt, stack: AsyncExitStack) -> Caller:
        try:
            return await stack.enter_async_context(self._services.caller(attempt))
        except (ServiceError, ConflictError):
            raise
        except (Exception, SystemExit) as error:
            raise ServiceError(f"The rollout's state failed: {type(error).__name__}.") from error


@contextmanager
def _checking(attempt: ProxyAttempt, name: str) -> Iterator[None]:
    """A malformed change is the environment's bug."""
    try:
        yield
    except InputError as error:
        raise _bug(attempt, name, error) from error


def _changed_request(request: ModelRequest, call: ModelCall, tokens: TokensConfig) -> ModelRequest:
    changes = copy.deepcopy(call.changes)
    if "messages" in changes:
        changes["messages"] = _shared(chat_messages(changes), request.messages)
        check_media(changes["messages"], tokens)
    if "tools" in changes:
        changes["tools"] = chat_tools(changes)
    if "prompt" in changes:
        changes["messages"] = [{"role": "user", "content": changes["prompt"]}]
    return msgspec.structs.replace(request, **changes)


def _shared(messages: list[Message], given: list[Message]) -> list[Message]:
    """Returns `messages` with those of `given` where they are equal: the record holds them once."""
    known = {repr(message): message for message in given}
    return [known.get(repr(message), message) for message in messages]


def _changed_answer(call: ModelCall) -> Message:
    (message,) = chat_messages({"messages": [copy.deepcopy(call.changes["answer"])]})
    text = message.get("content")
    if message.get("role") != "assistant" or not (text is None or isinstance(text, str)):
        raise InputError("An answer must be an assistant message whose content is a string.")
    if call.prompt is not None and (text is None or message.get("tool_calls")):
        raise InputError("The answer of a text completion must be a string.")
    for made in message.get("tool_calls") or []:
        function = made.get("function") or {}
        if not (made.get("id") and isinstance(function.get("arguments"), str)):
            raise InputError("A tool call must have an id, and arguments as a string.")
    return message


def _changed_choice(choice: dict[str, Any], message: Message) -> dict[str, Any]:
    """Returns the fields of a choice whose message was changed: its logprobs are of other text."""
    finish = choice.get("finish_reason")
    if message.get("tool_calls"):
        finish = "tool_calls"
    elif finish == "tool_calls":
        finish = "stop"
    return {"message": message, "finish_reason": finish, "logprobs": None}


def _event(at: Any, call: ModelCall, agent: str | None) -> HookEvent:
    return HookEvent(at=at, reason=call.reason, changed=sorted(call.changes), agent=agent)


_EFFECTIVE = "only call.change(...) and call.refuse(...) have an effect"


def _bug(
    attempt: ProxyAttempt, name: str, error: BaseException, hook: Hook | None = None
) -> HookError:
    """Records that a hook raised; the agent learns only the kind of error."""
    if isinstance(error, HookBug):
        kind, what, text = error.kind, str(error), error.text
    else:
        kind = type(error).__name__
        what = f"{kind}: {str(error)[:1000]} {place_of(error, hook)}"
        text = "".join(traceback.format_exception(error))[-_MOST_TRACEBACK:]
    attempt.service_failed(
        HookError(
            f"The environment's {name} raised {what}",
            traceback=text.encode(errors="backslashreplace").decode(),
            bug=f"A bug in the environment: its {name} raised {what}",
        )
    )
    return HookError(f"The environment's {name} raised {kind}.")

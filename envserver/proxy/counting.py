"""Counts the tokens of a prompt without sampling: Anthropic's `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import NotFoundError

from .admission import admit_images, read_request
from .asgi import parse_object
from .attempts import ProxyAttempt, ended
from .body import engine_body
from .constraints import without_strict
from .dialects import DIALECTS
from .endpoint import EngineEndpoint

_MESSAGES = DIALECTS["v1/messages"]


async def count_tokens(
    endpoint: EngineEndpoint, attempt: ProxyAttempt, agent: str | None, body: bytes
) -> dict[str, Any]:
    """Returns the answer to a request: the tokens that the prompt of this conversation would have.

    It takes no turn and records nothing.

    Raises:
        InputError: the request is malformed, or asks for what no agent may ask.
        LimitReached: the rollout's time is over.
        ConflictError: the attempt is sealed.
        NotFoundError: the engine cannot count.
        EngineError: the engine failed.
    """
    if attempt.sealed:
        raise ended()
    attempt.check_time()
    memory = attempt.memory.setdefault(_MESSAGES.name, {})
    # The request has the fields of a message, except for the limit of an answer.
    with attempt.in_flight.reading():
        message = {**parse_object(body), "max_tokens": 1}
        request = read_request(_MESSAGES, message, memory, endpoint.tokens)
    await admit_images(request.messages, endpoint.tokens, attempt.in_flight)
    ready = await endpoint.ready()
    route = attempt.spec.route(agent)
    if ready.exact and route.trained and endpoint.tokens.strict_tools == "drop":
        request = without_strict(request)
    made = engine_body(
        request, model=endpoint.model(route.model), sampling=route.sampling, exact=ready.exact
    )
    count = await ready.count_prompt(attempt, request, made.body, agent)
    if count is None:
        raise NotFoundError(
            "This engine does not count the tokens of a prompt: it has no /tokenize for messages.",
            hint="--tokens.tokenizer names the model's folder, to count here.",
        )
    return {"input_tokens": count}

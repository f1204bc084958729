"""What clients look up beside their calls: the server, its model, a response. Nothing is sampled.

In: an attempt or a model's name, and a path. Out: the answer's body.
"""

from __future__ import annotations

from typing import Any

from envserver_records.errors import NotFoundError

from .attempts import ProxyAttempt
from .dialects.responses import find_response

SERVER: dict[str, Any] = {"object": "server", "name": "envserver"}
"""The answer to `GET /`, by which clients see that there is a server."""
MODELS, RESPONSES = "v1/models", "v1/responses/"


def model_list(name: str, max_model_len: int | None = None) -> dict[str, Any]:
    """Returns the list of the only model, as both OpenAI and Anthropic write it."""
    ends = {"has_more": False, "first_id": name, "last_id": name}
    return {"object": "list", "data": [_model(name, max_model_len)], **ends}


def model_at(path: str, name: str, max_model_len: int | None = None) -> dict[str, Any]:
    """Returns the answer to `GET /v1/models` or `/v1/models/{id}`.
    Raises NotFoundError: there is no such model.
    """
    wanted = path.removeprefix(MODELS).removeprefix("/")
    if not wanted:
        return model_list(name, max_model_len)
    if wanted != name:
        raise NotFoundError(f"There is no model {wanted[:80]!r} here, but {name!r}.")
    return _model(name, max_model_len)


def response_at(attempt: ProxyAttempt, path: str) -> dict[str, Any]:
    """Returns the answer to `GET /v1/responses/{id}`.
    Raises NotFoundError: no such response of this attempt was stored.
    """
    wanted = path.removeprefix(RESPONSES)
    response = find_response(attempt.memory.get("responses", {}), wanted)
    if response is None:
        raise NotFoundError(f"There is no stored response {wanted[:80]!r} in this attempt.")
    return response


def _model(name: str, max_model_len: int | None) -> dict[str, Any]:
    model: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "envserver"}
    model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    if max_model_len is not None:
        model["max_model_len"] = max_model_len
    return model

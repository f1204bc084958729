"""MCP's tools over JSON-RPC: `tools/list` and `tools/call`, within a session."""

from __future__ import annotations

from typing import Any, Final

from envserver_records.errors import EnvserverError, UsageError
from pydantic import ValidationError

from .models import Action
from .session import Session

INVALID_REQUEST: Final = -32600
_NO_METHOD: Final = -32601
_INVALID_PARAMS: Final = -32602
_FAILED: Final = -32603


async def answer_rpc(request: Any, session: Session | None) -> dict[str, Any]:
    """Returns the answer to a JSON-RPC request.

    Args:
        session: None: the request belongs to none.
    """
    if not isinstance(request, dict) or request.get("jsonrpc") != "2.0":
        return rpc_error(None, INVALID_REQUEST, "This is no JSON-RPC 2.0 request.")
    number, method, params = request.get("id"), request.get("method"), request.get("params") or {}
    if not isinstance(number, str | int | float | None):
        return rpc_error(None, INVALID_REQUEST, "id must be a string or a number.")
    if not isinstance(params, dict):
        return rpc_error(number, _INVALID_PARAMS, "params must be an object.")
    if session is None:
        return rpc_error(number, _NO_METHOD, "Tools belong to an episode: use them at /ws.")
    try:
        match method:
            case "tools/list":
                answer = await session.step(Action(type="list_tools"))
                return rpc_result(number, {"tools": answer.observation["tools"]})
            case "tools/call":
                return rpc_result(number, await _called(params, session))
    except ValidationError as error:
        return rpc_error(number, _INVALID_PARAMS, str(error))
    except UsageError as error:
        return rpc_error(number, _INVALID_PARAMS, error.message)
    except EnvserverError as error:
        return rpc_error(number, _FAILED, f"The episode failed: {error.kind}.")
    return rpc_error(number, _NO_METHOD, f"There is no method {str(method)[:80]!r}.")


async def _called(params: dict[str, Any], session: Session) -> dict[str, Any]:
    action = Action(
        type="call_tool",
        tool_name=params.get("name") or "",
        arguments=params.get("arguments") or {},
    )
    answer = await session.step(action)
    text = answer.observation["text"]
    return {
        "content": [{"type": "text", "text": text}],
        "isError": False,
        "reward": answer.reward,
        "done": answer.done,
    }


def rpc_result(number: Any, result: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to a request that succeeded."""
    return {"jsonrpc": "2.0", "id": number, "result": result}


def rpc_error(number: Any, code: int, message: str) -> dict[str, Any]:
    """Returns the answer to a request that failed."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}

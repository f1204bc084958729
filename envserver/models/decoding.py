"""What an engine's bytes say: an answer, or whose fault it is that there is none.

What `decode` gives is JSON in the strict sense, of finite numbers and valid text: an engine that
writes NaN where a logprob belongs has computed nothing that could be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import orjson
from envserver_records.errors import EngineError, EngineGarbage, EngineRefused, EngineUnavailable

MAX_REFUSAL_BYTES = 64 * 1024
_MAX_WORDS = 600
_HINTS = {
    401: "Set openai.api_key.",
    403: "Set openai.api_key.",
    404: "Check openai.base_url and openai.model_name.",
}


class Decoder:
    """Reads the answers of an engine whose key is `key`, which no message tells."""

    def __init__(self, key: str) -> None:
        self._key = key

    def decode(self, data: bytes) -> dict[str, Any]:
        """`data` as a JSON object that is no error.

        Raises:
            EngineGarbage: no JSON object.
            EngineRefused, EngineError: an error in an answer whose HTTP status says otherwise.
        """
        try:
            answer = orjson.loads(data)
        except orjson.JSONDecodeError:
            words = self.words(data[:MAX_REFUSAL_BYTES])
            raise EngineGarbage(f"The engine's answer is no JSON: {words}") from None
        if not isinstance(answer, dict):
            raise EngineGarbage("The engine's answer is no JSON object.")
        error = answer.get("error")
        if error or answer.get("object") == "error":
            facts = error if isinstance(error, dict) else answer
            status = facts.get("code")
            if isinstance(status, int) and is_refusal(status):
                raise self.refused(status, data)
            raise EngineError(f"The engine failed: {self.words(data)}")
        return answer

    def refused(self, status: int, data: bytes) -> EngineRefused:
        """The request was refused with HTTP `status` and `data` as the body."""
        message = f"The engine refused the request (HTTP {status}): {self.words(data)}"
        return EngineRefused(message, hint=_HINTS.get(status, ""), status=status)

    def failed(self, status: int, data: bytes) -> EngineError:
        """The engine failed with HTTP `status` and `data` as the body."""
        kind = EngineError if status == 500 else EngineUnavailable
        return kind(f"The engine failed (HTTP {status}): {self.words(data)}", status=status)

    def words(self, data: bytes) -> str:
        """What the engine says in the body of an error, short and without its key."""
        words = _error_message(data)
        if self._key:
            words = words.replace(self._key, "***")
        return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "…"


def is_refusal(status: int) -> bool:
    """Whether the request is at fault: another engine would refuse it too."""
    return 300 <= status < 500 and status not in (408, 429)


def retry_after(headers: Mapping[str, str]) -> float:
    """The seconds in a Retry-After header, which may also be a date; 0 without a usable one."""
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value[:9])
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def first_model(answer: dict[str, Any]) -> str:
    """The name of the first model in an answer to `/v1/models`.

    Raises:
        EngineGarbage: there is none.
    """
    try:
        name = answer["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        name = None
    if not isinstance(name, str):
        raise EngineGarbage("The engine lists no model.", hint="Set openai.model_name.")
    return name


def _error_message(data: bytes) -> str:
    """The message in the body of an error, in one of the shapes that servers use."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode(errors="replace").strip() or "(no words)"
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        body = error
    return body if isinstance(body, str) else orjson.dumps(body).decode()

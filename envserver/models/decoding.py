"""Decodes an engine's bytes: an answer, or an error and who is at fault.

`decode` accepts strict JSON only, with finite numbers and valid text: an engine that writes NaN
for a
logprob has computed nothing to train on.
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
    """Decodes the answers of an engine; `key` is removed from all messages."""

    def __init__(self, key: str) -> None:
        self._key = key

    def decode(self, data: bytes) -> dict[str, Any]:
        """Decodes `data` as a JSON object that is not an error.

        Raises:
            EngineGarbage: it is not a JSON object.
            EngineRefused, EngineError: it is an error, despite its HTTP status.
        """
        try:
            answer = orjson.loads(data)
        except orjson.JSONDecodeError:
            words = self.words(data[:MAX_REFUSAL_BYTES])
            raise EngineGarbage(f"The engine's answer is not JSON: {words}") from None
        if not isinstance(answer, dict):
            raise EngineGarbage("The engine's answer is not a JSON object.")
        error = answer.get("error")
        if error or answer.get("object") == "error":
            facts = error if isinstance(error, dict) else answer
            status = facts.get("code")
            if isinstance(status, int) and is_refusal(status):
                raise self.refused(status, data)
            raise EngineError(f"The engine failed: {self.words(data)}")
        return answer

    def refused(self, status: int, data: bytes) -> EngineRefused:
        """Returns the error for a refusal with HTTP `status` and body `data`."""
        message = f"The engine refused the request (HTTP {status}): {self.words(data)}"
        return EngineRefused(message, hint=_HINTS.get(status, ""), status=status)

    def failed(self, status: int, data: bytes) -> EngineError:
        """Returns the error for a failure with HTTP `status` and body `data`."""
        kind = EngineError if status == 500 else EngineUnavailable
        return kind(f"The engine failed (HTTP {status}): {self.words(data)}", status=status)

    def words(self, data: bytes) -> str:
        """Returns the engine's error message, shortened and without its key."""
        words = _error_message(data)
        if self._key:
            words = words.replace(self._key, "***")
        return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "…"


def is_refusal(status: int) -> bool:
    """Whether the request is at fault, so that every replica would refuse it."""
    return 300 <= status < 500 and status not in (408, 429)


def retry_after(headers: Mapping[str, str]) -> float:
    """Returns the seconds of a Retry-After header (a number or a date); 0 without a usable one."""
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
    """Returns the first model's name in an answer to `/v1/models`.

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
    """Extracts the message of an error body, in any of the forms that servers use."""
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

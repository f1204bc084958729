"""Decodes an engine's bytes: an answer, or an error and who is at fault.

`decode` accepts strict JSON only, with finite numbers and valid text: an engine that writes NaN
for a logprob has computed nothing to train on.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any

import msgspec
import orjson
from envserver_records.errors import EngineError, EngineGarbage, EngineRefused, EngineUnavailable

from .nesting import MAX_NESTING, nests_too_deeply

MAX_REFUSAL_BYTES = 64 * 1024
_MAX_WORDS = 600
_MAX_NAMES = 10
_LEAST_SECRET = 4
"""Characters of a key that is hidden in messages; a shorter one is a placeholder."""
_MAX_NAME_CHARACTERS = 120
_KEY = "Set the key: OPENAI_API_KEY, or ENVSERVER_OPENAI__API_KEY, or openai.api_key in a file."
_HINTS = {
    401: _KEY,
    403: _KEY,
    404: "Check openai.base_url and openai.model_name.",
}


class Decoder:
    """Decodes the answers of an engine; `key` is removed from all messages."""

    def __init__(self, key: str) -> None:
        self._key = key

    def decode(self, data: bytes, form: type | None = None) -> dict[str, Any]:
        """Decodes `data` as a JSON object that is not an error.

        Args:
            form: a TypedDict of the fields that are read, with `error` and `object`; if the data
                has this form, other fields are skipped, at half the cost. Else all are decoded.
                It takes no integers of over 64 bits: no JSON could be written of them.

        Raises:
            EngineGarbage: it is not a JSON object, or nests too deeply.
            EngineRefused, EngineError: it is an error, despite its HTTP status.
        """
        try:
            answer = None if form is None else _of_form(data, form)
            if answer is None:
                answer = orjson.loads(data)
                if nests_too_deeply(data, answer):
                    text = f"The engine's answer nests deeper than {MAX_NESTING} levels."
                    raise EngineGarbage(text)
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
        return _shortened(self._without_key(_error_message(data)), _MAX_WORDS)

    def models_hint(self, wanted: str, answer: dict[str, Any]) -> str:
        """Says which models an answer to `/v1/models` lists, those with names near `wanted` first.

        Returns "" if it lists none, or `wanted` itself.
        """
        names = [self._without_key(name) for name in model_names(answer)]
        if not names or wanted in names:
            return ""
        near = difflib.SequenceMatcher(b=wanted.lower())

        def distance(name: str) -> float:
            near.set_seq1(name.lower()[:_MAX_NAME_CHARACTERS])
            return -near.ratio()

        nearest = sorted(names, key=distance)[:_MAX_NAMES]
        listed = ", ".join(_shortened(name, _MAX_NAME_CHARACTERS) for name in nearest)
        others = f" and {len(names) - len(nearest)} more" if len(names) > len(nearest) else ""
        return f"The engine has {listed}{others}: set openai.model_name."

    def _without_key(self, text: str) -> str:
        is_secret = len(self._key or "") >= _LEAST_SECRET  # "x" would be found in many words
        return text.replace(self._key, "***") if self._key and is_secret else text


@lru_cache(maxsize=16)
def _decoder_of(form: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(form)


def _of_form(data: bytes, form: type) -> dict[str, Any] | None:
    """Returns the fields of `form` in `data`; None: it has another form."""
    try:
        found: dict[str, Any] = _decoder_of(form).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found


def is_refusal(status: int) -> bool:
    """Returns whether the request is at fault, so that every replica would refuse it."""
    return 400 <= status < 500 and status not in (408, 429)


def retry_after(headers: Mapping[str, str]) -> float:
    """Returns the seconds of a Retry-After header (a number or a date); 0 without a usable one."""
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value[:9])
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def first_model(answer: dict[str, Any]) -> str:
    """Returns the first model's name in an answer to `/v1/models`.
    Raises EngineGarbage: there is none.
    """
    names = model_names(answer)
    if not names:
        raise EngineGarbage("The engine lists no model.", hint="Set openai.model_name.")
    return names[0]


def model_names(answer: dict[str, Any]) -> list[str]:
    """Returns the models' names in an answer to `/v1/models`; what is malformed is left out."""
    models = answer.get("data")
    ids = (
        [one.get("id") for one in models if isinstance(one, dict)]
        if isinstance(models, list)
        else []
    )
    return [name for name in ids if isinstance(name, str)]


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[:characters] + "…"


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
    return body if isinstance(body, str) else data.decode()

"""Answers in JSON."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


def json_answer(value: Any, status: int = 200) -> Response:
    """`value`, which may hold numpy's numbers and arrays, as an answer."""
    body = orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, media_type="application/json")

"""What is no sampling: health, names, metrics, pausing, weights, adapters."""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .asking import Asking

Json = dict[str, Any]


class Control:
    """Answers requests about the engine itself."""

    def __init__(self, asking: Asking, *, lora: bool) -> None:
        self._asking = asking
        self._lora = lora
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/health", self._health),
            Route("/ping", self._health),
            Route("/version", self._version),
            Route("/v1/models", self._models),
        ]

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._asking.runner.alive else 500)

    async def _version(self, request: Request) -> Response:
        from ... import __version__

        return _json({"version": f"envserver-local {__version__}"})

    async def _models(self, request: Request) -> Response:
        names = [(self._asking.model, None)]
        names += [(one.name, self._asking.model) for one in self._asking.adapters.loaded]
        return _json({"object": "list", "data": [self._model(*name) for name in names]})

    def _model(self, name: str, parent: str | None) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "envserver",
            "root": name,
            "parent": parent,
            "max_model_len": self._asking.most_tokens,
        }


def _json(payload: Any) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")

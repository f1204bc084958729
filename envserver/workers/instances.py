"""The environments of one worker process: each built and set up once, however many rollouts ask."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context
from typing import Any

import orjson
from envserver_records.errors import ConfigError
from pydantic import ValidationError

from .. import registry
from ..environment import Environment
from .failures import ended_by


class Instances:
    """Environments by (reference, config).

    Args:
        patiently: a context in which blocking the loop is no sign of a hang.
    """

    def __init__(self, patiently: Callable[[], AbstractContextManager[None]]) -> None:
        self._patiently = patiently
        self._building: dict[bytes, asyncio.Task[Environment]] = {}

    async def get(self, reference: str, config: dict[str, Any]) -> Environment:
        """The environment after its `setup`; one that failed is built anew for the next rollout."""
        key = orjson.dumps([reference, config], option=orjson.OPT_SORT_KEYS)
        task = self._building.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            # In a context of its own: what setup starts belongs to no rollout.
            build = asyncio.create_task(self._build(reference, config), context=Context())
            task = self._building[key] = build
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Runs every `close`; one that raises is reported on stderr and hinders no other."""
        for task in self._building.values():
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if task.cancelled() or task.exception():
                continue
            try:
                await task.result().close()
            except (Exception, SystemExit):  # noqa: BLE001 - code of others; this process ends either way
                traceback.print_exc(file=sys.stderr)

    async def _build(self, reference: str, config: dict[str, Any]) -> Environment:
        with self._patiently():
            kind = registry.find(reference)
            try:
                settings = kind.Config.model_validate(config)
            except ValidationError as error:
                raise ConfigError(f"The config is not for {reference!r}: {error}") from error
            try:
                environment = kind(settings)
                await environment.setup()
            except (SystemExit, KeyboardInterrupt) as error:  # the loop would end with it
                raise ended_by(error) from error
            return environment

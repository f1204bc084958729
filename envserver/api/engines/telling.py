"""Publishes the engine list to remote runners."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import orjson

from ...remote.messages import EngineList, ToldEngine

if TYPE_CHECKING:
    from ...models.fleet import Fleet


def engine_list(fleet: Fleet) -> EngineList:
    """Returns the engines of `fleet` that runners may call."""
    facts = [msgspec.structs.asdict(one) for one in sorted(fleet.shared(), key=lambda one: one.url)]
    engines = [ToldEngine(**{name: one[name] for name in ToldEngine.model_fields}) for one in facts]
    told = orjson.dumps([one.model_dump() for one in engines])
    return EngineList(id=hashlib.blake2b(told, digest_size=8).hexdigest(), engines=engines)

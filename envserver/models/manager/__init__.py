"""Engines that are started here: vLLM, or the local one; watched, restarted, ended with us.

async with running(spec, tell=print) as engine:
    engine.base_url, engine.model, engine.backend
"""

from .running import RunningEngine, running_engine
from .spec import EngineSpec, engine_spec

__all__ = ["RunningEngine", "EngineSpec", "running_engine", "engine_spec"]

"""Starts vLLM or the local engine, restarts it when it dies, and stops it with us.

async with running_engine(spec, tell=print) as engine:
    engine.base_url, engine.model, engine.backend
"""

from .running import EngineSpec, RunningEngine, engine_spec, running_engine

__all__ = ["RunningEngine", "EngineSpec", "running_engine", "engine_spec"]

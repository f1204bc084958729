"""Engines that are started here: vLLM, or the local one; watched, restarted, ended with us.

async with running(spec, tell=print) as engine:
    engine.base_url, engine.model, engine.backend
"""

from .running import Running, running
from .spec import Spec, spec_of

__all__ = ["Running", "Spec", "running", "spec_of"]

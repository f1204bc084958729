"""The simulated engine: a seeded script that behaves like a model server, without a language model.

    engine.SimEngine(SimConfig(), solver)        in this process
    server.serve_sim(SimConfig(), host, port)    over HTTP, with vLLM's paths

It needs no extra.
"""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"

"""The Python API for asyncio: `await envserver.aio.process(...)`.

The same functions as in `envserver`, which has them for code without asyncio.
"""

from __future__ import annotations

from .running.python_api import (
    ProcessResult,
    ScoreResult,
    Server,
    evaluate,
    groups,
    process,
    replay,
    rescore,
    score,
    serve,
    verify,
)

__all__ = [
    "ProcessResult", "ScoreResult", "Server", "evaluate", "groups", "process", "replay", "rescore",
    "score", "serve", "verify",
]  # fmt: skip

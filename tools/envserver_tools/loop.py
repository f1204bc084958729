"""The agent loop, which `run.loop` runs: the names of `envserver.tools.loop`."""

from __future__ import annotations

from envserver.tools.calling import EndReason, LoopEnd
from envserver.tools.loop import chat_with_tools

__all__ = ["EndReason", "LoopEnd", "chat_with_tools"]

"""A stand-in for the proxy whose model says what a task's `codes` say, without latency."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from aiohttp import web

from envserver.workers import Assignment
from support.worker_standin import StandIn, serving

ZOO = str(Path(__file__).with_name("gaia_zoo.py"))


class Scripted(StandIn):
    """Says the task's `codes`, one a turn, then the answer 42."""

    def ask(
        self, *codes: str, seconds: float = 20.0, step_seconds: float = 3.0, max_steps: int = 8
    ) -> Assignment:
        """An attempt at the question of a GaiaZoo; where a code is "", the model only talks."""
        public = {"question": "How much is it?", "codes": list(codes)}
        how: dict[str, Any] = {"file": ZOO, "kind": "GaiaZoo", "isolation": "sandboxed"}
        how["config"] = {"step_seconds": step_seconds, "max_steps": max_steps}
        return self.open("", seconds=seconds, **how, **public)

    async def _chat(self, request: web.Request) -> web.Response:
        codes = self._jobs[request.match_info["key"]]["task"]["public"]["codes"]
        messages = (await request.json())["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        code = codes[turn] if turn < len(codes) else "final_answer('42')"
        said = f"Now.\n<code>\n{code}\n" if code else "I wonder."
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"choices": [{**choice, "stop_reason": "</code>"}]})


def scripted() -> AbstractAsyncContextManager[Scripted]:
    """Serves one."""
    return serving(Scripted)

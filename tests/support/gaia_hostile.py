"""The environment `gaia` with a model that looks for answers, forges, hangs, eats and dies.

For test_gaia_hostile.py. Each row's question is `<agent> <name> ...`: the scripted model says what
stands under that name in gaia_hostile.toml.
"""

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envserver_environments.gaia.env import Gaia

from envserver import Message, PublicTask, Rollout, Split, Task

_SAID = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LOOKS = _SAID["looks"] | {
    name: _SAID["find_key"] + look for name, look in _SAID["with_key"].items()
}
"""Each prints what it found."""

TWICE = ("memory", *_SAID["with_key"])
"""Programs that look for the attempt's key. Each runs twice: in the first interpreter, whose memory
never held it, and in the second, which is a fork of the worker."""
LEAVE = "import os\nos._exit(0)"

TROUBLE = {
    name: [code] * (9 if name in ("hangs", "is deaf") else 1)
    for name, code in _SAID["trouble"].items()
}
"""What the model's code does, step by step, before an answer that is wrong."""
IN_PROCESS = "ends its agent"
"""What an agent that executes code in its own process would do."""


class Hostile(Gaia):
    """Rows come in the order of their questions."""

    class Config(Gaia.Config):
        canary_port: int = 1
        host: str = "127.0.0.1"

    def tasks(self, split: Split) -> Iterator[Task]:
        yield from sorted(super().tasks(split), key=lambda task: str(task.public["question"]))

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        _, agent, name = task.public["question"].split(" | ")[:3]
        self.config = self.config.model_copy(update={"agent": agent})
        if name == IN_PROCESS:
            await run.chat([{"role": "user", "content": task.public["question"]}])
            os._exit(0)
        return await super().rollout(task, run)

    def demonstration(self, task: Task) -> list[Message]:
        _, agent, name = task.public["question"].split(" | ")[:3]
        if name in TROUBLE:
            codes = ["6 * 7", *TROUBLE[name]]
            return [*(_says(agent, code) for code in codes), _answers(agent, "7x")]
        if name not in LOOKS:
            return [_says(agent, "6 * 7"), _answers(agent, str(task.hidden["answer"]))]
        config = self.config
        facts = (
            f"COPY, HOST = {str(config.data_path)!r}, {config.host!r}; PORT = {config.canary_port}"
        )
        look = f"{_SAID['begin']}\n{facts}\n{LOOKS[name]}\n{_SAID['end']}"
        looked = [_says(agent, code) for code in ([look, LEAVE, look] if name in TWICE else [look])]
        if agent != "code":
            return [*looked, _answers(agent, "nothing")]
        last = "final_answer(min(found).decode() if found else 'nothing')"
        return [*looked, _says(agent, last)]


def _says(agent: str, code: str) -> Message:
    if agent == "code":
        return {"role": "assistant", "content": f"Now.\n<code>\n{code}\n</code>"}
    return _calls("python", code=code)


def _answers(agent: str, answer: str) -> Message:
    if agent == "code":
        return _says(agent, f"final_answer({answer!r})")
    return _calls("final_answer", answer=answer)


def _calls(name: str, **arguments: Any) -> Message:
    call = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": call}],
    }

"""smolagents (PyPI): its CodeAgent with a tool `bash`, in its own virtual environment.

Its memory rewrites turns of the model before it sends them again. Here each is sent back as it was
sampled, and nothing stops the model at `</code>`, so that a conversation is one training row.
"""

from __future__ import annotations

import json

from .launch import WORDS_FILE, Harness, Launch, Package, Session

_PROGRAM = '''\
import json, subprocess, sys
from pathlib import Path

from openai import OpenAI
from smolagents import ChatMessage, CodeAgent, Model, tool
from smolagents.models import MessageRole

about = json.loads(Path(sys.argv[1]).read_text())
client = OpenAI(base_url=about["base_url"], api_key=about["api_key"], max_retries=0)


def text_of(message):
    content = message.content or ""
    return content if isinstance(content, str) else "\\n".join(
        part["text"] for part in content if part["type"] == "text"
    )


class AsSampled(Model):
    def __init__(self):
        super().__init__(model_id=about["model"])
        self.turns = []

    def generate(self, messages, **options):
        turns, wire = iter(self.turns), []
        for message in messages:
            if message.role == MessageRole.TOOL_CALL:  # repeats what the turn says
                continue
            if message.role == MessageRole.ASSISTANT:
                wire.append(next(turns))
                continue
            role = "system" if message.role == MessageRole.SYSTEM else "user"
            if wire and wire[-1]["role"] == role:
                wire[-1]["content"] += "\\n\\n" + text_of(message)
            else:
                wire.append({"role": role, "content": text_of(message)})
        said = client.chat.completions.create(model=self.model_id, messages=wire)
        turn = said.choices[0].message.model_dump(exclude_none=True)
        self.turns.append(turn)
        return ChatMessage(role=MessageRole.ASSISTANT, content=turn.get("content") or " ")


@tool
def bash(command: str) -> str:
    """Runs a command with bash in the working directory and returns what it prints.

    Args:
        command: The command.
    """
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )
    return done.stdout if done.returncode == 0 else f"{done.stdout}\\nexit status {done.returncode}"


agent = CodeAgent(
    tools=[bash], model=AsSampled(), max_steps=10_000,
    executor_kwargs={"timeout_seconds": None},  # the rollout's time bounds it
)
Path(about["words_file"]).write_text(str(agent.run(about["instruction"])))
'''


def _launch(session: Session) -> Launch:
    home = session.home
    about = {
        "base_url": session.base_url,
        "api_key": session.api_key,
        "model": session.model,
        "instruction": session.instruction,
        "words_file": str(home / WORDS_FILE),
    }
    return Launch(
        argv=[
            f"{session.spec.place}/bin/python",
            *("-P", str(home / "smol.py"), str(home / "smol.json")),
            *session.spec.arguments,
        ],
        files={"smol.py": _PROGRAM, "smol.json": json.dumps(about)},
        words_file=WORDS_FILE,
    )


SMOLAGENTS = Harness(
    name="smolagents",
    launch=_launch,
    package=Package(registry="pypi", name="smolagents[openai]", version="1.26.0"),
)

"""An environment whose agent is a program that gets the environment's tools by MCP."""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envserver_records.records import Split

from envserver import Caller, Environment, Message, PublicTask, Result, Rollout, Score, Task, tool


class Desk(Environment):
    """Learn the secret from one tool, and save it with the other."""

    isolation = "dedicated"
    preload = ("mcp",)

    class Config(Environment.Config):
        program: str
        """The agent's program: .../claude or .../codex."""

    def tasks(self, split: Split) -> Iterator[Task]:
        yield Task("one", {"question": "What is the secret? Save it."}, {"secret": "amber"})

    @tool(on_server=True)
    async def secret(self, caller: Caller) -> str:
        """Returns the secret."""
        return str(caller.task.hidden["secret"])

    @tool
    async def save_answer(self, answer: str) -> str:
        """Saves the answer.

        Args:
            answer: in one word.
        """
        return f"Saved {answer}."

    async def rollout(self, task: PublicTask, run: Rollout) -> Any:
        start = codex if Path(self.config.program).name == "codex" else claude
        with tempfile.TemporaryDirectory() as home:
            async with run.serve_mcp() as mcp:
                words, variables = start(self.config.program, run, mcp, Path(home))
                process = await asyncio.create_subprocess_exec(
                    *(*words, task.public["question"]),
                    cwd=home,
                    env={"PATH": os.environ["PATH"], "HOME": home, **variables},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )
                told, _ = await process.communicate()
        return told.decode()

    def score(self, task: Task, result: Result) -> Score:
        return Score(reward=float(f"Saved {task.hidden['secret']}." in str(result.messages)))

    def demonstration(self, task: Task) -> list[Message]:
        arguments = [{}, {"answer": 3}, {"answer": "amber"}]
        names = ["mcp__env__secret", "mcp__env__save_answer", "mcp__env__save_answer"]
        functions = [
            {"name": name, "arguments": json.dumps(given)}
            for name, given in zip(names, arguments, strict=True)
        ]
        calls: list[Message] = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"call{n}", "type": "function", "function": function}],
            }
            for n, function in enumerate(functions)
        ]
        return [*calls, {"role": "assistant", "content": "It is saved."}]


def claude(program: str, run: Rollout, mcp: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Returns command and variables of Claude Code."""
    words = [
        *(program, "--output-format", "stream-json", "--verbose", "--bare", "--tools", ""),
        *("--dangerously-skip-permissions", "--strict-mcp-config"),
        *("--mcp-config", json.dumps({"mcpServers": {"env": {"type": "http", "url": mcp}}}), "-p"),
    ]
    return words, {
        "ANTHROPIC_BASE_URL": run.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": run.api_key,
        "ANTHROPIC_MODEL": run.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }


def codex(program: str, run: Rollout, mcp: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Returns command and variables of Codex."""
    config = Path(__file__).with_name("codex.toml.txt").read_text()
    (home / "config.toml").write_text(
        config.format(model=run.model, base_url=run.base_url, mcp=mcp)
    )
    words = [
        *(program, "exec", "--skip-git-repo-check", "--json"),
        "--dangerously-bypass-approvals-and-sandbox",
    ]
    return words, {"CODEX_HOME": str(home), "OPENAI_API_KEY": run.api_key}

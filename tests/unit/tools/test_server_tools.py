"""Tools that run in the server: with the task's hidden part and its keys, never in the worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import envserver
from envserver import Caller, Environment, Score, Task, ToolError, tool
from envserver.environment import tools_of
from envserver.tools.serving import server_tools

ONE = {"total_steps": 1, "group_size": 1}
ALWAYS = {"solve_probability": 1.0, "openers": False}
VAULT = '''
import json
import os

from envserver import Caller, Environment, Score, Task, ToolError, tool


class Vault(Environment):
    """Find a word that only the server knows."""

    def tasks(self, split):
        yield Task("word", {"length": 5}, {"word": "amber"})

    @tool(on_server=True)
    async def letter(self, place: int, caller: Caller) -> str:
        """Returns one letter.

        Args:
            place: its place, from 1.
        """
        if not 1 <= place <= 5:
            raise ToolError(f"there is no letter {place}.")
        return caller.task.hidden["word"][place - 1] + str(os.getpid()) + os.environ["VAULT_KEY"]

    @tool(on_server=True)
    def broken(self, caller: Caller) -> str:
        """Fails with a secret."""
        return {}[caller.task.hidden["word"]]

    async def rollout(self, task, run):
        messages = [{"role": "user", "content": "Which word?"}]
        end = await run.loop(messages)
        told = [one["content"] for one in messages if one["role"] == "tool"]
        return {"told": told, "key": os.environ.get("VAULT_KEY"), "worker": os.getpid()}

    def score(self, task, result):
        return Score(reward=1.0)

    calls = [("letter", {"place": 1}), ("letter", {"place": 9}), ("letter", {"place": "x"})]

    def demonstration(self, task):
        calls = [
            {"id": f"c{number}", "type": "function",
             "function": {"name": name, "arguments": json.dumps(arguments)}}
            for number, (name, arguments) in enumerate(self.calls)
        ]
        return [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "assistant", "content": "done"},
        ]


class Broken(Vault):
    calls = [("broken", {})]
'''


def test_a_tool_on_the_server_knows_what_the_worker_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAULT_KEY", "-k3y")
    (tmp_path / "vault.py").write_text(VAULT)
    made = envserver.process(f"{tmp_path}/vault.py:Vault", model="sim", env=ONE, sim=ALWAYS)
    output = made.groups[0].trajectories[0].output
    assert output["told"] == [
        f"a{os.getpid()}-k3y",
        "Error: there is no letter 9.",
        "Error: the arguments of letter are not valid: Expected `int`, got `str` - at `place`.",
    ]
    assert output["worker"] != os.getpid() and output["key"] is None


@pytest.mark.thorough
def test_its_bug_is_told_once_without_what_it_knew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAULT_KEY", "")
    (tmp_path / "vault.py").write_text(VAULT)
    with pytest.raises(envserver.EnvserverError) as told:
        envserver.process(f"{tmp_path}/vault.py:Broken", model="sim", env=ONE, sim=ALWAYS)
    assert "The tool 'broken' raised KeyError in the server" in str(told.value)
    assert "vault.py:" in str(told.value) and "amber" not in str(told.value)


def test_the_model_does_not_see_the_caller_and_listed_methods_are_bound() -> None:
    class Shown(Environment):
        def tasks(self, split: str) -> Any: ...

        @tool
        def own(self) -> str:
            """Returns its class."""
            return type(self).__name__

        @tool(on_server=True)
        def look(self, name: str, caller: Caller) -> str:
            """Looks."""
            raise ToolError(f"{name} {caller}")

        tools = [own, len]

        async def rollout(self, task: Any, run: Any) -> None: ...

        def score(self, task: Task, result: object) -> Score:
            return Score(reward=0.0)

    own, other = tools_of(Shown())
    assert (own(), other) == ("Shown", len)  # type: ignore[operator]
    assert [one.name for one in server_tools(Shown())] == ["look"]

    parameters = Shown.look.description["function"]["parameters"]
    assert list(parameters["properties"]) == ["name"]

"""`envserver run` on one task: for a debugger, by hand, and again when a file changes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver
from support.in_process import Run
from support.terminal import Terminal
from support.waiting import PATIENCE

ENVIRONMENT = '''
from envserver import Environment, Score, Task

NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": NOTE}}


class Sums(Environment):
    """Add one."""

    class Config(Environment.Config):
        stops: bool = False
        fails: str = ""

    def look(self, place):
        if self.config.fails == place:
            raise ZeroDivisionError(f"in {place}")

    def tasks(self, split):
        self.look("tasks")
        for number in range(5):
            if self.config.stops and number == 3:
                breakpoint()
            yield Task(f"t{number}", {"question": f"{number} + 1?"}, {"answer": str(number + 1)})

    async def rollout(self, task, run):
        self.look("rollout")
        print(f"the agent has {task.id}")
        messages = [{"role": "user", "content": task.public["question"]}]
        if self.config.stops:
            breakpoint()
        while True:
            reply = await run.chat(messages, tools=[TOOL])
            messages.append(reply.message)
            if not reply.tool_calls:
                return reply.content
            for call in reply.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "noted"})

    def prepare_scoring(self):
        self.look("prepare_scoring")
        self.bonus = 0.0
        if self.config.stops:
            breakpoint()

    def score(self, task, result):
        self.look("score")
        if self.config.stops:
            breakpoint()
        return Score(reward=self.bonus + float(result.output.endswith(task.hidden["answer"])))

    def demonstration(self, task):
        return [{"role": "assistant", "content": f"It is {task.hidden['answer']}"}]
'''
TASK = "run --env sums.py --task t3 -o t3.json"
SIM = "--model sim --sim.solve_probability 1 --sim.openers false"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "sums.py").write_text(ENVIRONMENT)
    return tmp_path


def document(place: Path) -> Any:
    return json.loads((place / "t3.json").read_text())


def test_breakpoints_work_in_all_of_the_environment(place: Path) -> None:
    typed = "p number\nc\np self.bonus\nc\np task.id\nc\np result.output\nc\n"
    ran = envserver(*f"{TASK} {SIM} --debug --env.stops true".split(), folder=place, input=typed)
    assert ran.returncode == 0, ran.stderr
    seen = ran.stdout.split("(Pdb)")
    assert "sums.py" in seen[0] and "tasks()" in seen[0] and seen[1].startswith(" 3")
    assert "prepare_scoring()" in seen[2] and seen[3].startswith(" 0.0")
    assert "rollout()" in seen[4] and "the agent has t3" in seen[4] and seen[5].startswith(" 't3'")
    assert "score()" in seen[6] and seen[7].startswith(" 'It is 4'")
    assert "Reward: 1" in ran.stderr
    told = document(place)
    assert told["metadata"]["reward"] == 1.0 and told["final_answer"] == "It is 4"


@pytest.mark.thorough
@pytest.mark.parametrize("fails", ["tasks", "prepare_scoring", "rollout", "score"])
def test_the_traceback_is_the_environments(place: Path, fails: str, run: Run) -> None:
    lines = run(f"{TASK} {SIM} --debug --env.fails {fails}", status=1).err.splitlines()
    first = lines.index("Traceback (most recent call last):")
    assert 'sums.py"' in lines[first + 1] and f"in {fails}" in lines[first + 1]
    assert lines[-1] == f"ZeroDivisionError: in {fails}"
    assert not any("/envserver/" in line for line in lines[first:])


def test_what_cannot_be_run_is_said_before_anything_starts(place: Path, run: Run) -> None:
    for words, told in {
        f"{place}/sums.py --task t3 --question '5 + 1?'": "--question cannot be given with --task",
        f"{place}/sums.py": "--question is needed. Or name a task",
        "gaia --task x --debug": "without a sandbox",
    }.items():
        assert told in run(f"run --env {words} {SIM}", status=2)


@pytest.mark.thorough
def test_a_person_plays_the_model_at_a_terminal(place: Path) -> None:
    with Terminal(f"{TASK} --interactive", place) as terminal:
        shown = terminal.until("> ")
        assert "You are the model" in shown and "3 + 1?" in shown and "!note {text}" in shown
        terminal.type('!note {"txt": "carry"}')
        assert "note does not take that: 'text' is a required property" in terminal.until("again.")
        terminal.type('!note {"text": "carry"}', "")
        assert "[tool]" in terminal.until("noted")
        terminal.until("> ")
        terminal.type("It must be", "4", "")
        terminal.until("Reward: 1")
        assert terminal.process.wait(PATIENCE) == 0
    (messages,) = [one["messages"] for one in document(place)["metadata"]["sequences"]]
    function = {"name": "note", "arguments": '{"text": "carry"}'}
    assert messages[1]["tool_calls"][0]["function"] == function
    assert messages[-1]["content"] == "It must be\n4"


@pytest.mark.thorough
def test_a_person_who_leaves_ends_the_run(place: Path) -> None:
    ran = envserver(*TASK.split(), "--interactive", folder=place, input="half an ans")
    assert ran.returncode == 1
    assert "The person who plays the model has left." in ran.stderr


@pytest.mark.thorough
def test_a_changed_file_runs_the_task_again(place: Path) -> None:
    with Terminal(f"{TASK} {SIM} --watch --debug", place) as terminal:
        terminal.until("Reward: 1")
        terminal.until("Waiting for a change")
        (place / "sums.py").write_text(ENVIRONMENT.replace("self.bonus + float(", "0.5 * float("))
        terminal.until("sums.py has changed: running again.")
        terminal.until("Reward: 0.5")
        terminal.until("Waiting for a change")
        os.killpg(terminal.process.pid, signal.SIGINT)
        assert terminal.process.wait(PATIENCE) == 130

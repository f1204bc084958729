"""Asks the riddles of a data file."""

import json
from pathlib import Path

import riddles.scoring
from envserver import Environment, Task
from riddles.programs import run_program

from .scoring import grade
from .scoring import graders as grader_file

RIDDLES = json.loads(Path(__file__).with_name("riddles.json").read_text())
"""Read when the file is imported: a sandboxed worker does not see the folder later."""


class Pooled(Environment):
    name = "riddles"

    def tasks(self, split):
        for number, riddle in enumerate(RIDDLES):
            program = f"print(open({grader_file.__file__!r}).read())"
            public = {"question": riddle["question"], "program": program}
            yield Task(f"riddle-{number}", public, {"answer": riddle["answer"]})

    async def rollout(self, task, run):
        reply = await run.chat([{"role": "user", "content": task.public["question"]}])
        return {"answer": reply.content, "program": run_program(task.public["program"])}

    def score(self, task, result):
        assert riddles.scoring.grade is grade
        return grade(task.hidden["answer"], result.output)

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.hidden["answer"]}]


class Dedicated(Pooled):
    isolation = "dedicated"


class Sandboxed(Pooled):
    isolation = "sandboxed"

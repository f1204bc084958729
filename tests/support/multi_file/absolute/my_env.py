"""An environment that imports the modules beside it by their bare names, as a script does."""

import statistics as own_statistics

import graders
from helpers import QUESTION, run_program

from envserver import Environment, Score, Task
from tools import reading_program


class Pooled(Environment):
    """Answers a question, then runs a program that tries to read the grader's file."""

    name = "absolute"

    def tasks(self, split):
        for number in range(4):
            public = {"question": f"{QUESTION} {number}", "program": reading_program(graders)}
            yield Task(f"add-{number}", public, {"answer": str(number + own_statistics.ADDED)})

    async def rollout(self, task, run):
        reply = await run.chat([{"role": "user", "content": task.public["question"]}])
        return {"answer": reply.content, "program": run_program(task.public["program"])}

    def score(self, task, result):
        return graders.grade(task.hidden["answer"], result.output)

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.hidden["answer"]}]


class Dedicated(Pooled):
    isolation = "dedicated"


class Sandboxed(Pooled):
    isolation = "sandboxed"


class Misplaced(Pooled):
    """Imports a module when the sandboxed worker can no longer see it."""

    isolation = "sandboxed"

    async def rollout(self, task, run):
        import late

        return {"answer": late.ANSWER, "program": "unreadable"}

    def score(self, task, result):
        return Score(reward=1.0)


class Preloaded(Misplaced):
    """Imports the same module, which is preloaded."""

    preload = ("late",)

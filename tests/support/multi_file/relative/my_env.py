"""An environment that imports the modules beside it by relative imports."""

from envserver import Environment, Task

from . import graders
from .helpers import QUESTION, run_program


class Pooled(Environment):
    name = "relative"

    def tasks(self, split):
        for number in range(4):
            program = f"print(open({graders.__file__!r}).read())"
            public = {"question": f"{QUESTION} {number}", "program": program}
            yield Task(f"double-{number}", public, {"answer": str(2 * number)})

    async def rollout(self, task, run):
        reply = await run.chat([{"role": "user", "content": task.public["question"]}])
        return {"answer": reply.content, "program": run_program(task.public["program"])}

    def score(self, task, result):
        from .graders import grade  # in a scorer, which sees the folder

        return grade(task.hidden["answer"], result.output)

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.hidden["answer"]}]


class Dedicated(Pooled):
    isolation = "dedicated"


class Sandboxed(Pooled):
    isolation = "sandboxed"

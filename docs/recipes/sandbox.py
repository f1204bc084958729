"""A sandbox: the model's program runs without network, secrets or graders, and is judged there.

    envserver process --env docs/recipes/sandbox.py --model sim

The agent may try its function; the scorer runs it in a fresh sandbox on arguments that the agent
never saw. The right values never enter a sandbox.
"""

import json
import re

from envserver import Environment, KnownResult, Result, SandboxSpec, Score, Task

PROBLEMS = [  # what to write, a solution, and arguments with the right values
    ("is_even(n): is n even?", "return n % 2 == 0", {0: True, 7: False, -4: True}),
    ("digits(n): the sum of n's digits.", "return sum(map(int, str(n)))", {0: 0, 409: 13}),
]


class Write(Environment):
    """Write a Python function."""

    sandbox = SandboxSpec()

    def tasks(self, split):
        for number, (asked, body, cases) in enumerate(PROBLEMS):
            name = asked.partition("(")[0]
            hidden = {"body": body, "cases": [[key, value] for key, value in cases.items()]}
            yield Task(f"write-{number}", {"asked": asked, "name": name}, hidden)

    async def rollout(self, task, run):
        asked = f"Write a Python function in a ```python block: {task.public['asked']}"
        messages = [{"role": "user", "content": asked}]
        reply = await run.chat(messages)
        async with run.open_sandbox() as sandbox:
            tried = await sandbox.run_python(code_of(reply.content))
        if tried.ok:
            return code_of(reply.content)
        failed = {"role": "user", "content": f"It fails: {tried.stderr.decode()[-500:]}"}
        return code_of((await run.chat([*messages, reply.message, failed])).content)

    async def score(self, task, result):
        inputs, wanted = zip(*task.hidden["cases"], strict=True)
        show = f"import json; print(json.dumps([{task.public['name']}(n) for n in {list(inputs)}]))"
        async with self.sandboxes.open(self.sandbox) as sandbox:
            ran = await sandbox.run_python(f"{result.output or ''}\n{show}")
        return Score(reward=float(ran.stdout.decode().strip() == json.dumps(wanted)))

    def demonstration(self, task):
        code = f"def {task.public['name']}(n):\n    {task.hidden['body']}"
        return [{"role": "assistant", "content": f"```python\n{code}\n```"}]

    def known_results(self, task):
        wrong = f"def {task.public['name']}(n): return 0"
        yield KnownResult("always 0", Result(output=wrong))


def code_of(text):
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))

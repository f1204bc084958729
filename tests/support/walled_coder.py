"""An environment whose agent executes what the model writes, for test_sandboxed_workers.py."""

from __future__ import annotations

import subprocess
import sys

from envserver import Environment, Score, Task


class Coder(Environment):
    isolation = "sandboxed"

    def tasks(self, split):
        for number in range(8):
            question = f"print({number} * 7)"
            yield Task(f"times-{number}", {"question": question}, {"answer": str(number * 7)})

    async def rollout(self, task, run):
        reply = await run.chat([{"role": "user", "content": task.public["question"]}])
        code = reply.content.splitlines()[-1]
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return done.stdout.strip()

    def score(self, task, result):
        return Score(reward=float(result.output == task.hidden["answer"]))

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.public["question"]}]

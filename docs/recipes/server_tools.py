"""Tools with secrets: a key and the customers' records stay on the server.

    BANK_KEY=s3cret envserver process --env docs/recipes/server_tools.py --model sim

A tool marked `on_server=True` runs in the server, which has the key and the hidden part of the
task. The model reads its schema and results; the agent's process has neither key nor record. A
server without the key is a failure of ours: the run ends with the place, and nothing gets 0.
"""

import json
import os
import random

from envserver import Caller, Environment, KnownResult, Result, Score, Task, ToolError, tool


async def ask_bank(key, pin, record):
    """Stands for a request to a service that wants the key."""
    if pin != record["pin"]:
        raise ToolError("the PIN is wrong.")  # which the model reads
    return record["balance"]


class Bank(Environment):
    """Tell customers their balance."""

    def tasks(self, split):
        rng = random.Random(f"bank-{self.config.seed}-{split}")
        for number in range(100):
            pin = rng.randrange(1000, 10000)
            record = {"pin": pin, "balance": str(rng.randrange(10, 1000))}
            yield Task(f"bank-{number}", {"question": f"My PIN is {pin}. My balance?"}, record)

    @tool(on_server=True)
    async def balance(self, pin: int, caller: Caller) -> str:
        """Returns the customer's balance.

        Args:
            pin: the customer's PIN.
        """
        return await ask_bank(os.environ["BANK_KEY"], pin, caller.task.hidden)

    async def rollout(self, task, run):
        return (await run.loop([{"role": "user", "content": task.public["question"]}])).text

    def score(self, task, result):
        words = (result.output or "").rstrip(". ").split()
        return Score(reward=float(words[-1:] == [task.hidden["balance"]]))

    def demonstration(self, task):
        function = {"name": "balance", "arguments": json.dumps({"pin": task.hidden["pin"]})}
        calls = [{"id": "call-1", "type": "function", "function": function}]
        answer = f"Your balance is {task.hidden['balance']}."
        first = {"role": "assistant", "content": "", "tool_calls": calls}
        return [first, {"role": "assistant", "content": answer}]

    def known_results(self, task):
        yield KnownResult("no balance", Result(output="Your balance is fine."))

"""Call the right tools with the right arguments, in one message (Atropos).

    envserver process --env docs/rebuilt/tool_calls.py --env.rows calls.jsonl --model sim

A line has `messages`, `tools` in OpenAI's form, and `calls`: [["name", {arguments}], ...].
"""

import json
from pathlib import Path

from envserver import Environment, Score, Task


class ToolCalls(Environment):
    class Config(Environment.Config):
        rows: Path = Path("calls.jsonl")
        """File of tasks."""

    def tasks(self, split):
        for number, line in enumerate(self.config.rows.read_text().splitlines()):
            row = json.loads(line)
            yield Task(f"row-{number}", row, {"calls": row.pop("calls")})

    async def rollout(self, task, run):
        reply = await run.chat(task.public["messages"], tools=task.public["tools"])
        functions = [call["function"] for call in reply.tool_calls]
        return [[one["name"], one["arguments"]] for one in functions]

    def score(self, task, result):
        try:
            calls = [[name, json.loads(given)] for name, given in result.output or []]
        except ValueError:  # which is no JSON
            return Score(reward=0.0)
        return Score(reward=float(calls == task.hidden["calls"]))

    def demonstration(self, task):
        functions = [{"name": n, "arguments": json.dumps(a)} for n, a in task.hidden["calls"]]
        calls = [{"id": f["name"], "type": "function", "function": f} for f in functions]
        return [{"role": "assistant", "content": "", "tool_calls": calls}]

"""Look a name up with a tool, and say what it returned (verifiers)."""

import json

from envserver import Environment, KnownResult, Result, Score, Task, tool

FACTS = {
    "Ada Lovelace": "wrote the first program",
    "Lise Meitner": "explained nuclear fission",
    "Emmy Noether": "linked symmetries to conserved quantities",
}


class Glossary(Environment):
    def tasks(self, split):
        for name, fact in FACTS.items():
            yield Task(name, {"question": f"Look up {name}; repeat the entry."}, {"fact": fact})

    @tool
    def look_up(self, name: str) -> str:
        """Returns what a person is known for."""
        return FACTS.get(name, "There is no such entry.")

    async def rollout(self, task, run):
        return (await run.loop([{"role": "user", "content": task.public["question"]}])).text

    def score(self, task, result):
        return Score(reward=float(task.hidden["fact"] in (result.output or "")))

    def demonstration(self, task):
        function = {"name": "look_up", "arguments": json.dumps({"name": task.id})}
        calls = [{"id": "call-1", "type": "function", "function": function}]
        first = {"role": "assistant", "content": "", "tool_calls": calls}
        return [first, {"role": "assistant", "content": task.hidden["fact"]}]

    def known_results(self, task):
        yield KnownResult("a guess", Result(output="I do not know."))

"""Environments whose models say what they are asked to say.

Not in the file of tests: each worker and scorer would import all that the tests need.
"""

import asyncio
from typing import Any

from envserver import Environment, Score, Task


class Echo(Environment):
    """Says what it is asked to say."""

    class Config(Environment.Config):
        api_key: str = ""

    def tasks(self, split: str) -> Any:
        for number in range(9):
            yield Task(f"echo-{number}", {"word": f"word-{number}"}, {"word": f"word-{number}"})

    async def rollout(self, task: Any, run: Any) -> Any:
        return (await run.chat([{"role": "user", "content": task.public["word"]}])).content

    def score(self, task: Any, result: Any) -> Score:
        return Score(reward=float(task.hidden["word"] in (result.output or "")))

    def demonstration(self, task: Any) -> Any:
        return [{"role": "assistant", "content": task.hidden["word"]}]


PLAIN = ("a/b/../c", "..", "/", "line\nbreak", "\U0001f600", "x" * 5000, "%2F?q=1#f", "<b>'\"")
IDS = dict(zip(PLAIN, PLAIN, strict=True)) | {"half \ud800": "half \\ud800", "nul \0": "nul \\x00"}
"""Ids of tasks as an environment gives them, and as they are written everywhere."""


class AnyIds(Echo):
    """Its tasks' ids are any text."""

    def tasks(self, split: str) -> Any:
        for task_id in IDS:
            yield Task(task_id, {"word": "word"}, {"word": "word"})


SYSTEM = {"role": "system", "content": "Work."}


class Talker(Echo):
    """Says things for as many turns as it may, or until another limit ends it."""

    async def rollout(self, task: Any, run: Any) -> Any:
        talk = [{"role": "user", "content": "Say something."}]
        for _ in range(self.config.max_turns):
            answer = await run.chat(talk)
            talk.append({"role": "assistant", "content": answer.content})
            talk.append({"role": "user", "content": "And what else? " * 5})
        return answer.content

    def score(self, task: Any, result: Any) -> Score:
        return Score(reward=float(result.turns > 2))


class Compacting(Echo):
    """Summarises twice. A sub-agent with its system message runs in between, another one beside."""

    async def rollout(self, task: Any, run: Any) -> Any:
        async def say(talk: list[Any], *texts: str) -> None:
            talk += [{"role": "user", "content": text} for text in texts]
            answer = await run.chat(talk)
            talk.append({"role": "assistant", "content": answer.content})

        main, helper, beside = [SYSTEM], [SYSTEM], [SYSTEM]
        await say(main, "Solve it.")
        await say(helper, "Look it up.")
        await say(helper, "Once more.")
        await say(main, "Go on.")
        main = [SYSTEM]
        await say(main, "Half of it is solved.")
        await asyncio.gather(say(main, "Go on."), say(beside, "Draw it."))
        await say([SYSTEM], "Half of it is solved.", "Now most of it.")
        return run.rollout_id[-1]

    def score(self, task: Any, result: Any) -> Score:
        return Score(reward=float(result.output))

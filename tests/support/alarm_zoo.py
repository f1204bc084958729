"""Environments that misbehave, each so that one alarm says it; loaded by path, as a user's file."""

import os
import random

from envserver import Environment, Score, Task

ASKED = [{"role": "user", "content": "Say something."}]


class Healthy(Environment):
    """Rewards differ, answers differ."""

    exact_demonstrations = True

    def tasks(self, split):
        for number in range(1_000_000):
            yield Task(f"t{number}", {"number": number}, {})

    async def rollout(self, task, run):
        return (await run.chat(ASKED)).content

    def score(self, task, result):
        return Score(reward=float(random.random() < 0.75))

    def demonstration(self, task):
        words = " ".join(random.choice(["one", "two", "three", "four"]) for _ in range(12))
        return [{"role": "assistant", "content": words}]


class Zero(Healthy):
    """Never gives a reward."""

    def score(self, task, result):
        return Score(reward=0.0)


class Same(Healthy):
    """Every answer is the same, and worth the same."""

    def score(self, task, result):
        return Score(reward=0.5)

    def demonstration(self, task):
        return [{"role": "assistant", "content": "yes"}]


class Dies(Healthy):
    """Its agent ends the process that it runs in."""

    isolation = "dedicated"

    async def rollout(self, task, run):
        print("the last words", flush=True)
        os._exit(3)


class Masked(Healthy):
    """A grammar holds half of its answers, which are not trained."""

    async def rollout(self, task, run):
        await run.chat(ASKED, response_format={"type": "json_object"})
        return (await run.chat(ASKED)).content

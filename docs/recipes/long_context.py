"""Long context: a fact among many pages, with a text that neither tasks nor groups have to carry.

    envserver process --env docs/recipes/long_context.py --model sim --env.lines 800

A task holds the seed of its text and not the text, so that a million tasks cost nothing; the worker
writes it down when it is needed. Two lines must be combined, so that the first match is a wrong
answer. A text over the engine's context ends the rollout by a limit: it is scored, with no output.
"""

import random

from envserver import Environment, KnownResult, Result, Score, Task


def boxes_of(seed, count):
    """Returns the box of each key, and what is in each box."""
    rng = random.Random(seed)
    keys, boxes, things = (rng.sample(range(1000, 10000), count) for _ in range(3))
    return dict(zip(keys, boxes, strict=True)), dict(zip(boxes, things, strict=True))


class Boxes(Environment):
    """Find what lies in the box that a key opens."""

    class Config(Environment.Config):
        lines: int = 200
        """Lines of the text; each has about ten tokens."""

    def tasks(self, split):
        for number in range(1000):
            seed = f"boxes-{self.config.seed}-{split}-{number}"
            opens, holds = boxes_of(seed, self.config.lines // 2)
            key = next(iter(opens))
            public = {"seed": seed, "key": key}
            yield Task(f"boxes-{number}", public, {"answer": holds[opens[key]], "box": opens[key]})

    async def rollout(self, task, run):
        opens, holds = boxes_of(task.public["seed"], self.config.lines // 2)
        lines = [f"Key {key} opens box {box}." for key, box in opens.items()]
        lines += [f"In box {box} lies coin {thing}." for box, thing in holds.items()]
        random.Random(task.public["seed"]).shuffle(lines)
        lines.append(f"Which coin does key {task.public['key']} lead to? Answer with its number.")
        return (await run.chat([{"role": "user", "content": "\n".join(lines)}])).content

    def score(self, task, result):
        words = (result.output or "").rstrip(". ").split()
        return Score(reward=float(words[-1:] == [str(task.hidden["answer"])]))

    def demonstration(self, task):
        return [{"role": "assistant", "content": f"It is coin {task.hidden['answer']}."}]

    def known_results(self, task):
        yield KnownResult("the box instead", Result(output=f"{task.hidden['box']}"))

"""A curriculum: tasks by level, and a sampler that repeats those that are solved now and then.

    envserver serve --env docs/recipes/curriculum.py --curriculum.sampler difficulty \\
      --curriculum.solved_above 0.9 --openai.base_url http://localhost:9001/v1

Levels are interleaved, so that the model meets hard tasks early; the sampler then gives most
groups to tasks near `--curriculum.target` (0.5), skips most of those that are nearly always solved,
and still follows the environment's own order with the share `--curriculum.explore`. The metric
`level` shows in tables and `/metrics` how far the model has come.
"""

import random

from envserver import Environment, KnownResult, Result, Score, Task


class Levels(Environment):
    """Multiply numbers of one to five digits."""

    class Config(Environment.Config):
        levels: int = 5
        """Number of levels; a level has one more digit than the one before."""

    def tasks(self, split):
        rng = random.Random(f"levels-{self.config.seed}-{split}")
        for number in range(1000):
            level = 1 + number % self.config.levels
            a, b = (rng.randrange(10 ** (level - 1), 10**level) for _ in range(2))
            asked = {"question": f"What is {a} * {b}? Answer with the number.", "level": level}
            yield Task(f"level-{level}-{number}", asked, {"answer": str(a * b)})

    async def rollout(self, task, run):
        return (await run.chat([{"role": "user", "content": task.public["question"]}])).content

    def score(self, task, result):
        words = (result.output or "").rstrip(". ").split()
        right = float(words[-1:] == [task.hidden["answer"]])
        return Score(reward=right, metrics={"level": task.public["level"]})

    def demonstration(self, task):
        return [{"role": "assistant", "content": f"It is {task.hidden['answer']}."}]

    def known_results(self, task):
        near = str(int(task.hidden["answer"]) + 1)
        yield KnownResult("one too much", Result(output=f"It is {near}."))

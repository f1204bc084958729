"""Classic, single turn: a sum per row, a rubric of a reward and a metric."""

import re

import verifiers as vf
from datasets import Dataset


def exact(completion, answer):
    return float(completion[-1]["content"].strip() == answer)


def contains(completion, answer):
    """1 for an answer with the right number in it: a start from which a small model learns."""
    return float(answer in re.findall(r"\d+", completion[-1]["content"]))


def raises(completion, answer):
    """A reward function with a bug, or whose service is gone."""
    raise OSError("the judge is gone")


def best_of_group(completions, answers):
    """1 for each right answer of a group, if not all are right."""
    right = [exact(one, answer) for one, answer in zip(completions, answers, strict=True)]
    return [0.0 if all(right) else each for each in right]


def words(completion):
    return len(completion[-1]["content"].split())


def load_environment(count=8, scored_by="exact"):
    """Returns the environment; `scored_by`: exact, contains, raises or best_of_group."""
    sums = [divmod(number, 10) for number in range(count)]
    rows = [{"question": f"What is {a}+{b}?", "answer": str(a + b)} for a, b in sums]
    rubric = vf.Rubric(funcs=[globals()[scored_by]], weights=[0.5])
    rubric.add_metric(words)
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)

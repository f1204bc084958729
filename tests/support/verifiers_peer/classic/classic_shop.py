"""Classic, with tools: prices are asked for, and added up."""

import json

import verifiers as vf
from datasets import Dataset

PRICES = {"apple": 3, "pear": 5}


def price(item: str) -> int:
    """Returns the price of an item.

    Args:
        item: its name.
    """
    return PRICES[item]


def exact(completion, answer):
    """1 for the right last word."""
    return float(completion[-1]["content"].split()[-1:] == [answer])


def load_environment(paid_for=True):
    """Returns the environment. Its rows have the messages that play it rightly."""
    rows = []
    for number, item in enumerate(PRICES):
        call = {"name": "price", "arguments": json.dumps({"item": item})}
        first = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": f"call-{number}", "type": "function", "function": call}],
        }
        last = {"role": "assistant", "content": str(2 * PRICES[item]), "tool_calls": None}
        rows.append(
            {
                "question": f"What do two of {item} cost?",
                "answer": str(2 * PRICES[item]),
                "played": [first, last],
            }
        )
    rubric = vf.Rubric(funcs=[exact] if paid_for else [])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[price], rubric=rubric)

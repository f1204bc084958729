"""School maths; the number after #### counts (verifiers, Atropos)."""

from envserver import from_rows


def number(text):
    return text.rpartition("####")[2].strip().replace(",", "")


def right(answer, output):
    return float("####" in output and number(output) == number(answer))


Gsm8k = from_rows(
    "hub:openai/gsm8k",
    subset="main",
    prompt="{question}\n\nThink, and end with a line `#### NUMBER`.",
    reward=right,
)

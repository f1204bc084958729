"""Choose one of the letters A to D, and say so exactly once after thinking (Atropos)."""

import re

from envserver import from_rows


def letter(answer, output):
    visible = output.rpartition("</think>")[2]
    return float(re.findall(r"answer is:? \(?([A-D])\b", visible) == [answer])


MultipleChoice = from_rows(
    "hub:NousResearch/AcademicMCQA",
    prompt='{prompt}\n\nEnd with "The answer is" and the letter.',
    answer="ground_truth",
    demonstration="The answer is {ground_truth}.",
    reward=letter,
)

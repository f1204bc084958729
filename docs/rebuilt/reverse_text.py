"""Reverse a text; the reward is how similar the answer is to the right one (verifiers)."""

import re
from difflib import SequenceMatcher

from envserver import from_rows


def similarity(text, output):
    said = re.findall(r"<reversed_text>(.*?)</reversed_text>", output, re.DOTALL)[-1:] or [""]
    return SequenceMatcher(None, said[0].strip(), text[::-1]).ratio()


ReverseText = from_rows(
    "hub:PrimeIntellect/Reverse-Text-RL",
    columns={"text": "prompt"},
    system="Write the text backwards, letter by letter, between <reversed_text> tags.",
    reward=similarity,
)

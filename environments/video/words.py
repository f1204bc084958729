"""How like two answers in words are: token F1, as question answering counts it. Pure."""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """`text` in lower case, without punctuation, articles and needless blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(answer: str, gold: str) -> float:
    """The F1 of the words of `answer` against those of `gold`, in [0, 1]."""
    said, wanted = normalised(answer).split(), normalised(gold).split()
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted)) if common else 0.0

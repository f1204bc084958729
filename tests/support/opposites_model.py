"""Makes the tiny model that tosses a coin in opposites.py; run by the Python of the learner.

The likely answer is the word that it reads: the wrong one. About 12 seconds of CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

from coin_tosser import make_coin_tosser
from opposites import ANSWERER, CALLER, WORDS, question

if __name__ == "__main__":
    spots = [
        (question(agent, read), said, said == read)
        for agent in (CALLER, ANSWERER) * 8
        for read in WORDS
        for said in WORDS
    ]
    make_coin_tosser(Path(sys.argv[1]), spots, steps=100)

"""`python -m envserver_local.simulated.make_tokenizer` makes the simulated engine's tokenizer.

From `assets/corpus.txt` and the words of the policy, all written for this project, it makes a
folder that also loads with transformers' AutoTokenizer. The same text gives the same bytes (a test
holds this).

Three rules make the ids compositional, so that a prompt may be encoded in pieces and a completion
on its own: digits stand alone, newlines stand alone, and special tokens split the text first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import ASSETS
from .policy import CLOSERS, NOUNS, OPENERS, VERBS
from .tokenizer import END_OF_TEXT, IM_END, IM_START, LARGEST_CONTEXT

VOCABULARY_SIZE = 1536
_WORD_WEIGHT = 3
"""Weight of the template and the policy's phrases in training: most text consists of them."""


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in (END_OF_TEXT, IM_START, IM_END)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """What transformers reads in addition to tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": LARGEST_CONTEXT,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": (ASSETS / "chat_template.jinja").read_text(encoding="utf-8"),
    }


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    config = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def _texts() -> Iterator[str]:
    yield from (ASSETS / "corpus.txt").read_text(encoding="utf-8").splitlines()
    for _ in range(_WORD_WEIGHT):
        yield from (ASSETS / "chat_template.jinja").read_text(encoding="utf-8").splitlines()
        yield "system user assistant tool <tool_call> </tool_call> <tool_response> </tool_response>"
        yield "<tools> </tools> \\boxed{"
        yield from OPENERS
        yield from CLOSERS
        yield f" {' '.join(NOUNS)} {' '.join(VERBS)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild the simulated engine's tokenizer.")
    parser.add_argument(
        "--folder", type=Path, default=ASSETS, help="output folder (default: in place)"
    )
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()

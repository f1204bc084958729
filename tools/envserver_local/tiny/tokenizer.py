"""The model's own tokenizer: byte pairs of what it reads and says; every digit is a token.

Any text can be encoded, and decoding gives it back. Text is split as Qwen2 splits it, since that is
what transformers makes of any tokenizer of a Qwen2 model, whatever its files say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from .conversations import END_OF_TURN, TEMPLATE

VOCABULARY = 512
PADDING = "<|endoftext|>"
SPECIAL = (PADDING, "<|im_start|>", END_OF_TURN)
TOOL_MARKS = ("<tool_call>", "</tool_call>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern by which Qwen2 splits text before byte pairs, from its tokenizer.json."""


def trained_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Trains a tokenizer of VOCABULARY tokens; the same texts give the same tokenizer.

    Ids that are left when every word of `texts` is one token stay unused.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = [*SPECIAL, *TOOL_MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,
        show_progress=False,
        special_tokens=marks,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The parsers of tool calls read these: keep them when special tokens are skipped.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_MARKS])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a token that exists."""
    return int(tokenizer.encode(token, add_special_tokens=False).ids[0])


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer and the chat template in transformers' format."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        additional_special_tokens=list(SPECIAL),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)

"""A tiny random model that vLLM can serve: python tiny_model.py FOLDER [SEED] [tied] [padded].

Two layers of Qwen2 with a head size of 64 (the least that vLLM has on a CPU), a byte-level BPE
tokenizer (its merges in tiny_merges.txt), and a ChatML template with tools in the form of Hermes.
It babbles; what it says is of no interest, that its tokens and logprobs are real is. Runs in
.venv-vllm.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 4096
END_OF_TURN = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END_OF_TURN]
TEMPLATE = (Path(__file__).parent / "chat_templates/tiny.jinja").read_text()

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 splits text before the byte pairs, as its tokenizer.json says."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text can be encoded, and decoding gives it back."""
    bpe = Tokenizer(models.BPE(*_vocabulary()))
    # What transformers makes of any tokenizer of a Qwen2 model, whatever its file says.
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=SPECIAL[0],
        additional_special_tokens=SPECIAL,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens and merges, which do not change when texts of the project do: they were trained once
    on what its environments send, so that prompts stay short."""
    lines = (Path(__file__).parent / "tiny_merges.txt").read_text().splitlines()
    merges = [(first, second) for first, second in map(str.split, lines)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *dict.fromkeys(map("".join, merges))]
    return {token: number for number, token in enumerate(tokens)}, merges


def main(folder: Path, seed: int = 0, *, tied: bool = False, padded: bool = False) -> None:
    """padded: the model has ids, and samples them, that its tokenizer lacks, as many real ones."""
    words = tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY + (64 if padded else 0),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        # Ten times the usual spread: a distribution with peaks, so that logprobs differ.
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    # Among 4096 equals it would hardly ever come: so it ends one answer in a few.
    if not tied:
        model.lm_head.weight.data[words.eos_token_id] *= 3
    model.save_pretrained(folder)
    words.save_pretrained(folder)


if __name__ == "__main__":
    words = sys.argv[2:]
    numbers = [int(word) for word in words if word.isdecimal()]
    main(Path(sys.argv[1]), *numbers, tied="tied" in words, padded="padded" in words)

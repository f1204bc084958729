"""The model: a Qwen2 of about a million parameters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

MAX_TOKENS = 2048


def new_model(*, seed: int, vocabulary: int, end_of_turn: int, padding: int) -> Any:
    """Makes a Qwen2ForCausalLM with random weights, the same for the same seed.

    The head size is 64, the smallest that vLLM supports on a CPU. The embeddings are not tied to
    the head, because vLLM on a CPU does not reload tied weights correctly.
    """
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=192,
            intermediate_size=576,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=MAX_TOKENS,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=end_of_turn,
            pad_token_id=padding,
        )
    )

"""The fields of each API: what an agent may send, with type and bounds, and what becomes of it.

What is in no table of an API is treated alike in all of them (`is_ignored`): it is ignored, and the
calls say so, or it is refused by name unless the run passes it on (`tokens.extra_fields`). A field
that is null counts as not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .checks import (
    CHOICES,
    EFFORT,
    KIBIBYTE,
    LONG_TEXT,
    NAME,
    SEED,
    STOP,
    STOP_TEXTS,
    TOKEN_ID,
    TOKENS,
    TOP_LOGPROBS,
    Check,
    either,
    flag,
    items,
    mapping,
    number,
    one_of,
    template_variables,
    whole,
)


class FieldTable(NamedTuple):
    """The fields of one API.

    Args:
        engine: sent to the engine under their own names.
        read: read here: they are translated, or shape the answer that the agent gets.
        dropped: of no effect. Clients send them by themselves; samplers are the run's.
        refused: with the reason; allowed where they are off (`is_off`).
    """

    engine: Mapping[str, Check]
    read: Mapping[str, Check]
    dropped: frozenset[str]
    refused: Mapping[str, str]


_MESSAGES = items(100_000)
_TOOLS = items(KIBIBYTE)
_OPTIONS = mapping(64 * KIBIBYTE)
_SCHEMA = mapping(256 * KIBIBYTE)

_SAMPLERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "typical_p",
    "tfs",
    "top_a",
    "mirostat",
    "length_penalty",
    "dry_multiplier",
    "watermarking",
)
_ACCOUNTS = (
    "metadata",
    "moderation",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_INEXACT = {
    "truncate_prompt_tokens": "it would cut the prompt silently",
    "use_beam_search": "beams are not samples",
    "best_of": "discarded answers would be lost",
}
_ANY_DIALECT: dict[str, Check] = {"seed": SEED, "chat_template_kwargs": template_variables}
_SAMPLED: dict[str, Check] = {
    "n": CHOICES,
    "seed": SEED,
    "stop": STOP,
    "stop_token_ids": items(64, TOKEN_ID),
    "include_stop_str_in_output": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "add_special_tokens": flag,
    "return_tokens_as_token_ids": flag,
    "response_format": _SCHEMA,
}
_STREAMED: dict[str, Check] = {"model": NAME, "stream": flag, "stream_options": _OPTIONS}

CHAT = FieldTable(
    engine={
        **_SAMPLED,
        **_ANY_DIALECT,
        "top_logprobs": TOP_LOGPROBS,
        "tool_choice": either(one_of("auto", "none", "required"), _OPTIONS),
        "parallel_tool_calls": flag,
        "reasoning_effort": EFFORT,
        "include_reasoning": flag,
        "continue_final_message": flag,
        "add_generation_prompt": flag,
    },
    read={
        **_STREAMED,
        "messages": _MESSAGES,
        "tools": _TOOLS,
        "max_tokens": TOKENS,
        "max_completion_tokens": TOKENS,
        "logprobs": flag,
        "return_token_ids": flag,
        "modalities": items(1, one_of("text")),
    },
    dropped=frozenset((*_SAMPLERS, *_ACCOUNTS, "prediction", "verbosity", "web_search_options")),
    refused={
        **_INEXACT,
        "functions": "send tools",
        "function_call": "send tool_choice",
        "audio": "answers are text",
    },
)

COMPLETIONS = FieldTable(
    engine={**_SAMPLED, "logprobs": either(one_of(False), TOP_LOGPROBS)},
    read={
        **_STREAMED,
        "prompt": either(LONG_TEXT, items(64 * KIBIBYTE * KIBIBYTE)),
        "max_tokens": TOKENS,
        "return_token_ids": flag,
    },
    dropped=frozenset((*_SAMPLERS, *_ACCOUNTS)),
    refused={**_INEXACT, "echo": "answers hold no prompt", "suffix": "there is no text behind it"},
)

RESPONSES = FieldTable(
    engine=_ANY_DIALECT,
    read={
        **_STREAMED,
        "input": either(LONG_TEXT, _MESSAGES),
        "instructions": LONG_TEXT,
        "previous_response_id": NAME,
        "tools": _TOOLS,
        "tool_choice": either(NAME, _OPTIONS),
        "parallel_tool_calls": flag,
        "max_tool_calls": whole(1, 2**31 - 1),
        "max_output_tokens": TOKENS,
        "text": _SCHEMA,
        "reasoning": _OPTIONS,
        "include": items(64, NAME),
        "top_logprobs": TOP_LOGPROBS,
        "truncation": NAME,
        "n": CHOICES,
        # Told again in the answer.
        "metadata": _OPTIONS,
        "store": flag,
        "user": NAME,
        "safety_identifier": NAME,
        "prompt_cache_key": NAME,
        "temperature": number(0, 100),
        "top_p": number(0, 1),
    },
    dropped=frozenset(
        (*_SAMPLERS, *_ACCOUNTS, "access_programs", "client_metadata", "return_token_ids")
    ),
    refused={
        **_INEXACT,
        "background": "responses are only returned directly",
        "image": "answers are text",
        "conversation": "conversations are not stored here; use previous_response_id",
        "prompt": "prompts are not stored here",
        "context_management": "it would cut the prompt silently",
    },
)

MESSAGES = FieldTable(
    engine=_ANY_DIALECT,
    read={
        **_STREAMED,
        "messages": _MESSAGES,
        "system": either(LONG_TEXT, _MESSAGES),
        "max_tokens": TOKENS,
        "tools": _TOOLS,
        "tool_choice": _OPTIONS,
        "stop_sequences": STOP_TEXTS,
        "thinking": _OPTIONS,
        "thread": either(NAME, _OPTIONS),
        "output_config": _SCHEMA,
        "output_format": _SCHEMA,
        "n": CHOICES,
    },
    dropped=frozenset(
        (
            *_SAMPLERS,
            *_ACCOUNTS,
            "billing_policy",
            "betas",
            "cache_control",
            "context_management",
            "diagnostics",
            "fallback_credit_token",
            "fallbacks",
            "inference_geo",
            "return_token_ids",
            "speed",
            "user_profile_id",
            "workspace_id",
        )
    ),
    refused={
        **_INEXACT,
        "container": "there are no containers",
        "mcp_servers": "there are no tools but the agent's own",
        "compaction": "there are no summaries but the agent's own",
    },
)

_STEERING = frozenset(
    (
        *("cache_salt", "chat_template", "documents", "ec_transfer_params", "kv_transfer_params"),
        *("logits_processors", "logprob_token_ids", "lora_request", "media_io_kwargs"),
        *("mm_payload", "mm_processor_kwargs", "previous_input_messages", "priority"),
        *("prompt_embeds", "prompt_logprobs", "repetition_detection", "request_id"),
        *("routed_experts_prompt_start", "truncation_side", "vllm_xargs"),
        *("custom_logit_processor", "ebnf", "input_ids", "lora_path", "regex", "rid"),
    )
)
"""Fields by which a request steers vLLM or SGLang."""
_MEANINGLESS = ("thinking", "reasoning")
"""Fields of one API that programs also send to the others."""
_OFF: dict[str, tuple[Any, ...]] = {
    "best_of": (False, 1),
    "function_call": ("none",),
    "thinking_token_budget": (-1,),
}
"""Values by which a field switches nothing on; of others false, 0 and what is empty."""


def is_ignored(name: str) -> bool:
    """Returns whether a field that is in no table of its API is ignored: it steers no engine, and
    nothing would be lost that it says in another API."""
    tables = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
    known = (name in (*one.engine, *one.read, *one.refused) for one in tables)
    return name in _MEANINGLESS or not (name in _STEERING or any(known))


def is_off(name: str, value: Any) -> bool:
    """Returns whether a field switches nothing on."""
    return value in _OFF[name] if name in _OFF else not value

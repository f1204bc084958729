"""An agent's chat request -> what is asked of the engine, and what the agent itself asked for.

Pure. The distribution that tokens are sampled from is the run's alone: its temperature and top_p
are sent whatever the agent asks for, and every other sampler setting is sent switched off, so that
neither the agent nor the defaults that come with a model change it. What the agent's protocol needs
(stop, tools, seed, formats) is kept. Fields that would make the record inexact are refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import InputError

_REFUSED = {
    "truncate_prompt_tokens": "it would cut the prompt where nobody sees it",
    "use_beam_search": "beams are not sampled",
    "best_of": "the answers that are thrown away would be lost",
}
_OURS = ("max_tokens", "max_completion_tokens", "stream", "stream_options", "return_token_ids")
_SAMPLERS_OFF: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_OTHER_SAMPLERS = ("typical_p", "tfs", "top_a", "mirostat", "length_penalty", "dry_multiplier")
_CONSTRAINTS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
)
"""They mask the distribution; the recorded logprobs are then not those of what was sampled from."""
_SAMPLING = (
    "temperature",
    "top_p",
    *_SAMPLERS_OFF,
    *_CONSTRAINTS,
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "seed",
    "ignore_eos",
    "tool_choice",
    "response_format",
)
_MAX_CHOICES = 128


class ChatPlan(msgspec.Struct, kw_only=True):
    """What one chat request comes to.

    Args:
        body: for the engine; `with_max_tokens` completes it.
        wanted_tokens: the agent's own limit per choice, None without one.
        stream: the agent wants a stream.
        relay: the engine is asked for a stream too (no tools: what is parsed from a stream may
            differ from what is parsed from the whole answer).
        wants_*: what the agent asked for and may therefore see.
        flags: of every call that comes out of it.
    """

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    choices: int
    wanted_tokens: int | None
    tokens_field: str
    stream: bool
    relay: bool
    wants_usage: bool
    wants_logprobs: bool
    wants_token_ids: bool
    wants_reasoning: bool
    flags: list[str]

    def with_max_tokens(self, max_tokens: int | None) -> None:
        """Sets the limit per choice that was granted."""
        if max_tokens is None:
            return
        self.body[self.tokens_field] = max_tokens
        least = self.body.get("min_tokens")
        if isinstance(least, int) and least > max_tokens:
            self.body["min_tokens"] = max_tokens

    def sampling(self) -> dict[str, Any]:
        """The sampling fields of the body."""
        return {name: self.body[name] for name in _SAMPLING if name in self.body}


def plan_chat(
    request: dict[str, Any], *, model: str, sampling: dict[str, Any], exact: bool
) -> ChatPlan:
    """The plan for `request`, the decoded body of an agent's request.

    Args:
        sampling: the run's `temperature` and `top_p`.
        exact: the engine returns token ids and logprobs when asked.

    Raises:
        InputError: a field is missing, has the wrong form, or is refused; `place` names it.
    """
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", "must be a list of at least one message")
    if not all(isinstance(message, dict) for message in messages):
        raise _bad("messages", "must hold objects only")
    tools = request.get("tools") or []
    if not isinstance(tools, list):
        raise _bad("tools", "must be a list")
    for name, reason in _REFUSED.items():
        if request.get(name) not in (None, False):
            raise _bad(name, f"is not possible here: {reason}")
    stream = bool(request.get("stream"))
    options = request.get("stream_options")
    wanted = [_count(request, name) for name in ("max_completion_tokens", "max_tokens")]
    relay = stream and not tools and not request.get("functions")
    body = {name: value for name, value in request.items() if name not in _OURS}
    _set_sampling(body, sampling, exact)
    body["model"] = model
    if relay:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    if exact:
        body["return_token_ids"] = True
        body["logprobs"] = True
        if "include_reasoning" in body:
            body["include_reasoning"] = True
    return ChatPlan(
        body=body,
        messages=messages,
        tools=tools,
        choices=_choices(request),
        wanted_tokens=min((count for count in wanted if count is not None), default=None),
        tokens_field="max_tokens" if wanted[0] is None else "max_completion_tokens",
        stream=stream,
        relay=relay,
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        wants_logprobs=bool(request.get("logprobs")),
        wants_token_ids=bool(request.get("return_token_ids")),
        wants_reasoning=request.get("include_reasoning") is not False,
        flags=_flags(body, sampling),
    )


def _set_sampling(body: dict[str, Any], sampling: dict[str, Any], exact: bool) -> None:
    for name in (*_SAMPLERS_OFF, *_OTHER_SAMPLERS):
        body.pop(name, None)
    if exact:
        body.update(_SAMPLERS_OFF)
    for name in ("temperature", "top_p"):
        if name in sampling:
            body[name] = sampling[name]


def _flags(body: dict[str, Any], sampling: dict[str, Any]) -> list[str]:
    flags = []
    if sampling.get("temperature", 1.0) != 1.0:
        flags.append("temperature_not_one")
    if sampling.get("top_p", 1.0) != 1.0:
        flags.append("top_p_active")
    if _is_constrained(body):
        flags.append("structured_output_masked")
    return flags


def _is_constrained(body: dict[str, Any]) -> bool:
    if any(body.get(name) for name in _CONSTRAINTS):
        return True
    choice = body.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        return True
    form = body.get("response_format")
    return isinstance(form, dict) and form.get("type") not in (None, "text")


def _choices(request: dict[str, Any]) -> int:
    choices = _count(request, "n") or 1
    if choices > _MAX_CHOICES:
        raise _bad("n", f"must be at most {_MAX_CHOICES}")
    return choices


def _count(request: dict[str, Any], name: str) -> int | None:
    value = request.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad(name, "must be a whole number of at least 1")
    return value


def _bad(name: str, what: str) -> InputError:
    return InputError(f"{name} {what}.", place=name)

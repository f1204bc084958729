"""Text to token ids and back, and messages to the prompt's text and back; the conversation of a
request is the same whether an agent sends messages or a proxy sends the prompt's ids.

Invariants: the ids of a text are the ids of its lines and special tokens put one after the other,
so a prompt followed by a completion has the ids of the one followed by the ids of the other;
`parsed(text)` gives the message that `assistant_text` turns into exactly `text` again. Together: a
conversation to which the returned message is appended unchanged has a prompt that begins with the
ids of the earlier prompt and completion.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from envserver_records.errors import EngineRefused
from envserver_records.records import Json, Logprobs, Message
from numpy.typing import NDArray
from tokenizers import Tokenizer

from envserver.tokens.chat_format import ChatTemplate

from . import ASSETS

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15
_BINS = 4096
_DRAWS = 16

U64 = NDArray[np.uint64]


def mixed_bits(values: U64) -> U64:
    """Scrambles 64-bit numbers bijectively (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: U64 = values ^ (values >> np.uint64(31))
    return mixed


def _table() -> Logprobs:
    """Log-probabilities at evenly spaced quantiles: mostly near zero, with a tail."""
    quantile = (np.arange(_BINS, dtype=np.float64) + 0.5) / _BINS
    return (-(0.001 + 3.0 * quantile**6 - 0.15 * np.log1p(-quantile))).astype(np.float32)


class Logits:
    """The logprob function, for ids below `vocabulary_size`, prefixes up to `max_length` tokens.

    A logprob is a float32 in (-6, 0) that depends only on the token and the ids before it. So
    sampling and re-scoring give the same bits on every machine and in pieces of any size (64-bit
    integers, then a table; no floating point of the CPU). The numbers look like a confident model's
    (mean about -0.55), but their probabilities over the whole vocabulary do not sum to one.

    A prefix is known by its fold, the sum of mix(id) * BASE**position modulo 2**64. Folds add up,
    so the fold of a prompt comes from the folds of its pieces without touching their tokens again.
    """

    def __init__(self, vocabulary_size: int, max_length: int) -> None:
        self.vocabulary_size = vocabulary_size
        every = np.arange(1, vocabulary_size + 1, dtype=np.uint64)
        self._mix = mixed_bits(every * np.uint64(0xD6E8FEB86659FD93))
        self._salt = mixed_bits(every * np.uint64(0xA0761D6478BD642F))
        powers = np.full(max_length + 1, _BASE, dtype=np.uint64)
        powers[0] = 1
        self._powers = np.cumprod(powers, dtype=np.uint64)
        self._table = _table()

    def fold(self, ids: Sequence[int]) -> int:
        tokens = np.asarray(ids, dtype=np.intp)
        return int((self._mix[tokens] * self._powers[: len(tokens)]).sum(dtype=np.uint64))

    def joined(self, fold: int, length: int, next_fold: int) -> int:
        """The fold of `length` tokens with fold `fold`, followed by others with `next_fold`."""
        return (fold + int(self._powers[length]) * next_fold) & _MASK

    def score(self, fold: int, length: int, ids: Sequence[int]) -> Logprobs:
        """Logprobs `[len(ids)]` of `ids` after a prefix with this length and fold."""
        tokens = np.asarray(ids, dtype=np.intp)
        return self._look_up(self._before(fold, length, tokens), tokens)

    def alternatives(
        self, fold: int, length: int, ids: Sequence[int], count: int
    ) -> list[list[tuple[int, float]]]:
        """Per position up to `count` other tokens, all less likely than the actual one.

        Each has the logprob that `score` would give it there, the most likely first. They are drawn
        from the vocabulary by the prefix; more likely tokens are not listed.
        """
        tokens = np.asarray(ids, dtype=np.intp)
        before = self._before(fold, length, tokens)
        chosen = self._look_up(before, tokens)
        steps = np.arange(1, _DRAWS * count + 1, dtype=np.uint64) * np.uint64(_BASE)
        seeds = before[:, None] + steps[None, :]
        drawn = (mixed_bits(seeds) % np.uint64(self.vocabulary_size)).astype(np.intp)
        scores = self._look_up(before[:, None], drawn)
        rows = []
        for best, names, values in zip(
            chosen.tolist(), drawn.tolist(), scores.tolist(), strict=True
        ):
            lower = {name: value for name, value in zip(names, values, strict=True) if value < best}
            rows.append(sorted(lower.items(), key=lambda item: (-item[1], item[0]))[:count])
        return rows

    def _before(self, fold: int, length: int, tokens: NDArray[np.intp]) -> U64:
        steps = self._mix[tokens] * self._powers[length : length + len(tokens)]
        before: U64 = np.cumsum(steps, dtype=np.uint64) - steps + np.uint64(fold)
        return before

    def _look_up(self, before: U64, tokens: NDArray[np.intp]) -> Logprobs:
        bins = mixed_bits(before ^ self._salt[tokens]) >> np.uint64(52)
        return self._table[bins.astype(np.intp)]


END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
LARGEST_CONTEXT = 262_144
"""Maximum of `sim.context_tokens`: no prefix may be longer."""

_CALL_OPENS, _CALL_CLOSES = "<tool_call>\n", "\n</tool_call>"
_CACHED_BLOCKS = 4096


class Prompt(msgspec.Struct, frozen=True):
    """The input of the engine: its ids, the fold of the ids (see `Logits`) and its text."""

    ids: list[int]
    fold: int
    text: str


class SimTokenizer:
    """The shipped byte-level BPE with its ChatML template; loads in some milliseconds."""

    def __init__(self) -> None:
        self._bpe = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
        self.size: int = self._bpe.get_vocab_size()
        self.logits = Logits(self.size, LARGEST_CONTEXT)
        specials = self._bpe.get_added_tokens_decoder()
        self.special_ids = frozenset(specials)
        self.im_end: int = next(i for i, token in specials.items() if token.content == IM_END)
        self.bytes_of = [self._bytes(index) for index in range(self.size)]
        self.strings = [piece.decode("utf-8", "replace") for piece in self.bytes_of]
        self.spelling, self.name = self.bytes_of.__getitem__, self.strings.__getitem__
        self._block = lru_cache(maxsize=_CACHED_BLOCKS)(self._encoded_block)
        source = (ASSETS / "chat_template.jinja").read_text(encoding="utf-8")
        self._template = ChatTemplate(source, {})

    def encode(self, text: str) -> list[int]:
        """Special tokens in the text become special ids."""
        text.encode()
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def prompt(self, text: str) -> Prompt:
        """Encodes `text`, fast if it shares messages with earlier texts."""
        text.encode()
        head, *rest = text.split(IM_START)
        ids: list[int] = []
        fold = 0
        for block in [head, *(IM_START + block for block in rest)]:
            if block:
                block_ids, block_fold = self._block(block)
                if len(ids) + len(block_ids) > LARGEST_CONTEXT:
                    return Prompt(self.encode(text), 0, text)
                fold = self.logits.joined(fold, len(ids), block_fold)
                ids += block_ids
        return Prompt(ids, fold, text)

    def prompt_of_ids(self, ids: list[int]) -> Prompt:
        fold = self.logits.fold(ids) if len(ids) <= LARGEST_CONTEXT else 0
        return Prompt(ids, fold, self.decode(ids, special=True))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Broken UTF-8 becomes U+FFFD; special tokens on request."""
        skipped = () if special else self.special_ids
        pieces = [self.bytes_of[index] for index in ids if index not in skipped]
        return b"".join(pieces).decode("utf-8", "replace")

    def offsets(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of `ids` without special tokens, and its length after each id.

        A character counts from the token that completes it; an incomplete one is left out.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [
            "" if index in self.special_ids else decoder.decode(self.bytes_of[index])
            for index in ids
        ]
        ends, end = [], 0
        for piece in pieces:
            end += len(piece)
            ends.append(end)
        return "".join(pieces), ends

    def render(
        self,
        messages: list[Message],
        tools: list[Json] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Contents are text, arguments of calls JSON text or objects."""
        return self._template.render(
            messages, tools, generation_prompt=add_generation_prompt, kwargs={}
        )

    def _bytes(self, index: int) -> bytes:
        token = self._bpe.id_to_token(index) or ""
        if index in self.special_ids:
            return token.encode()
        return bytes(_BYTE_OF[character] for character in token)

    def _encoded_block(self, block: str) -> tuple[list[int], int]:
        ids: list[int] = self._bpe.encode(block, add_special_tokens=False).ids
        return ids, self.logits.fold(ids) if len(ids) <= LARGEST_CONTEXT else 0


@lru_cache(maxsize=1)
def shared_tokenizer() -> SimTokenizer:
    """The tokenizer shared by all engines of this process; it never changes."""
    return SimTokenizer()


def canonical_arguments(arguments: Any) -> str:
    """Arguments of a call, JSON text or an object, as canonical JSON text."""
    try:
        text = arguments if isinstance(arguments, str) else _to_json(arguments)
        return _to_json(_DECODER.decode(text))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"arguments are not JSON: {error}") from error


def assistant_text(message: Message) -> str:
    """The model's text for `message`; arguments of calls must be canonical JSON text."""
    content = message.get("content") or ""
    calls = [
        f'{_CALL_OPENS}{{"name": {_to_json(call["function"]["name"])}, '
        f'"arguments": {call["function"]["arguments"]}}}{_CALL_CLOSES}'
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join([content, *calls] if content else calls)


def parsed(text: str) -> tuple[str | None, list[tuple[str, str]]]:
    """The content and the calls (name, arguments as JSON text) in `text`.

    Anything that is not exactly in the format of `assistant_text` is content.
    """
    start = text.find(_CALL_OPENS)
    while start >= 0:
        calls = _calls(text, start)
        if calls and (start == 0 or (start > 1 and text[start - 1] == "\n")):
            return text[: start - 1] if start else None, calls
        start = text.find(_CALL_OPENS, start + 1)
    return text, []


class CallSpan(msgspec.Struct, frozen=True):
    """The start of a call in the text (`opens`) and the place of its arguments."""

    opens: int
    start: int
    end: int


def call_spans(text: str, functions: list[dict[str, str]]) -> list[CallSpan]:
    """The spans of the calls that `parsed(text)` found, in order."""
    spans: list[CallSpan] = []
    for function in reversed(functions):
        # From the end: what stands before the first call is content and may hold anything.
        end = (spans[-1].opens if spans else len(text)) - len(f"}}{_CALL_CLOSES}")
        start = end - len(function["arguments"])
        head = f'{_CALL_OPENS}{{"name": {_to_json(function["name"])}, "arguments": '
        opens = start - len(head)
        spans.append(CallSpan(max(opens - 1, 0), start, end))
    return spans[::-1]


def _calls(text: str, start: int) -> list[tuple[str, str]]:
    """The calls that follow each other from `start` to the end, or none."""
    calls = []
    while True:
        if not text.startswith(_CALL_OPENS, start):
            return []
        begin = start + len(_CALL_OPENS)
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return []
        if not text.startswith(_CALL_CLOSES, end) or not _is_call(value):
            return []
        if text[begin:end] != _to_json(value):
            return []
        calls.append((value["name"], _to_json(value["arguments"])))
        start = end + len(_CALL_CLOSES)
        if start == len(text):
            return calls
        if text[start] != "\n":
            return []
        start += 1


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and list(value) == ["name", "arguments"]
        and isinstance(value["name"], str)
        and isinstance(value["arguments"], dict)
    )


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE's printable characters (GPT-2's table) and their bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_characters()
_DECODER = json.JSONDecoder(parse_constant=_no_number)


# Both give the same conversation, so the policy gives the same answer whether an agent sends
# messages or a proxy sends the ids of the rendered prompt.


class Conversation(msgspec.Struct, frozen=True):
    """Messages with text contents, and the offered tools in OpenAI's format."""

    messages: list[Message]
    tools: list[Json]

    def turn(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)


def refusal(message: str, *, param: str | None = None, status: int = 400) -> EngineRefused:
    return EngineRefused(message, status=status, param=param)


def plain_messages(messages: list[Json]) -> list[Message]:
    """The messages with contents as text and arguments of calls as canonical JSON."""
    if not messages:
        raise refusal("There must be at least one message.", param="messages")
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def checked_tools(tools: list[Json] | None) -> list[Json]:
    if tools is not None and not tools:
        raise refusal("`tools` must not be empty; leave it out instead.", param="tools")
    for index, tool in enumerate(tools or []):
        if not _is_tool(tool):
            raise refusal(
                "A tool needs type 'function', a name, and parameters that are an object.",
                param=f"tools[{index}]",
            )
    return tools or []


def conversation_of_text(text: str) -> Conversation:
    """The conversation in a rendered prompt; text without ChatML is a user's message."""
    blocks = text.split(IM_START)[1:]
    messages: list[Message] = []
    for block in blocks:
        role, _, content = block.partition("\n")
        content, closed, _ = content.rpartition(IM_END)
        if closed:
            messages.append(_read_back(role, content))
    if not messages:
        return Conversation([{"role": "user", "content": text}], [])
    return Conversation(messages, _offered(messages))


def _plain(message: Json, place: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise refusal("A message needs a role.", param=f"{place}.role")
    plain: Message = {"role": role, "content": _text(message.get("content"), f"{place}.content")}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise refusal("`tool_calls` must be a list.", param=f"{place}.tool_calls")
        plain["tool_calls"] = [
            _plain_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return plain


def _text(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [_text_of(part) for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and None not in texts:
            return "".join(text for text in texts if text is not None)
    raise refusal("The simulated engine reads text and images only.", param=place)


def _text_of(part: Json) -> str | None:
    """A part as text: an image as a word that other images do not have."""
    image = part.get("image_url")
    if part.get("type") == "image_url" and isinstance(image, dict):
        return f"<image {hashlib.sha256(str(image.get('url')).encode()).hexdigest()[:12]}>"
    text = part.get("text")
    return text if isinstance(text, str) else None


def _plain_call(call: Any, place: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refusal("A tool call needs a function with a name.", param=place)
    arguments = function.get("arguments") or "{}"
    try:
        arguments = canonical_arguments(arguments)
    except ValueError:
        # Another model may have written them: text that cannot be parsed stays as it is.
        if not isinstance(arguments, str):
            raise refusal("The arguments of a call must be JSON.", param=place) from None
    return {"function": {"name": function["name"], "arguments": arguments}}


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return False
    function = tool.get("function")
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters") or {}, dict)
    )


def _read_back(role: str, content: str) -> Message:
    if role == "tool":
        content = content.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    if role != "assistant":
        return {"role": role, "content": content}
    said, calls = parsed(content)
    message: Message = {"role": role, "content": said or ""}
    if calls:
        message["tool_calls"] = [{"function": {"name": n, "arguments": a}} for n, a in calls]
    return message


def _offered(messages: list[Message]) -> list[Json]:
    first = messages[0]
    if first["role"] != "system" or "\n<tools>\n" not in first["content"]:
        return []
    listing = first["content"].rpartition("\n<tools>\n")[2].partition("\n</tools>\n")[0]
    try:
        tools = [json.loads(line) for line in listing.splitlines()]
    except ValueError:
        return []
    return [tool for tool in tools if _is_tool(tool)]

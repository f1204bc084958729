"""Chat templates of our own, tokenizers trained on the spot, and what to try on them.

The templates follow the published behaviour of well-known families; none is a copy.
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from envserver_records.records import Message
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from envserver.tokens.chat_format import ChatFormat
from envserver.tokens.vocabulary import Vocabulary

from .cases import cases_of

STOPS_OF = {
    "chatml": ["<|im_end|>"],
    "thinking": ["<|im_end|>"],
    "llama": ["<|eot_id|>"],
    "mistral": ["</s>"],
    "role_stops": ["<|user|>", "<|observation|>"],
}
"""The tokens by which a model ends its turn, by template."""

TEMPLATES = {
    path.stem: path.read_text() for path in Path(__file__).parent.glob("chat_templates/*.jinja")
}
OWN = {name: TEMPLATES[name] for name in STOPS_OF}
"""Those of families, by name."""
CHATML, THINKING, LLAMA, MISTRAL, ROLE_STOPS = OWN.values()
BOS, EOS = "<s>", "</s>"

_SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]|\[gMASK\]|<sop>"
    r"|<(?:start|end)_of_(?:turn|utterance|image)>|</?tool_calls?>|</?tool_response>|</?think>"
)
_SAMPLE = (
    """\
The quick brown fox jumps over the lazy dog. What is 2 + 2? It is 4, of course: 2 + 2 = 4.
system user assistant tool name arguments parameters function calculate search query expression
{"name": "calculate", "arguments": {"expression": "1+1", "precision": 2}}
Look at this: "quoted", (bracketed), [listed]; and so on.  Two spaces,\ttabs,\n\nempty lines.
"""
    * 4
)


@cache
def _trained(kind: str) -> str:
    """A tokenizer without special tokens, as JSON."""
    trainer = BpeTrainer(vocab_size=700, show_progress=False)
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = BpeTrainer(
            vocab_size=700,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        tokenizer.train_from_iterator([_SAMPLE], trainer)
        return tokenizer.to_str()
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    learner.train_from_iterator([_SAMPLE], trainer)
    model = json.loads(learner.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: id for id, piece in enumerate([*pieces, *model["vocab"]])}
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(bpe)
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:  # as the first Llama tokenizers: a space before every stretch of text
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer.to_str()


KINDS = ("byte_level", "metaspace", "prepended")
"""Kinds of tokenizers: GPT's, and SentencePiece's newer and older behaviour."""


def tokenizer(special: Iterable[str], kind: str = "byte_level") -> Tokenizer:
    """A small tokenizer with these special tokens beside `<s>` and `</s>`."""
    made = Tokenizer.from_str(_trained(kind))
    tokens = dict.fromkeys([BOS, EOS, *special])
    made.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    return made


def vocabulary(special: Iterable[str], kind: str = "byte_level") -> Vocabulary:
    """Such a tokenizer as a vocabulary."""
    return Vocabulary(tokenizer(special, kind), {"bos_token": BOS, "eos_token": EOS})


def chat_format(
    source: str, kind: str = "byte_level", special: Iterable[str] = (), stops: Iterable[str] = ()
) -> ChatFormat:
    """A chat format of `source`, whose special tokens are found by their look (or given)."""
    words = vocabulary([*_SPECIAL.findall(source), *special], kind)
    ids = (words.special_id(stop) for stop in (EOS, *stops))
    return ChatFormat(words, {"default": source}, frozenset(id for id in ids if id is not None))


def tool(name: str = "calculate") -> dict[str, Any]:
    """A tool of one or two parameters."""
    properties = {"expression": {"type": "string"}, "precision": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["expression"]}
    function = {"name": name, "description": "Works it out.", "parameters": schema}
    return {"type": "function", "function": function}


def call(
    arguments: dict[str, Any] | str, name: str = "calculate", id: str = "call00001"
) -> Message:
    """A tool call as an assistant message holds it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def answer(content: str | None, *calls: Message) -> Message:
    called = {"tool_calls": list(calls)} if calls else {}
    return {"role": "assistant", "content": content, **called}


def result(content: Any) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": "call00001"}


class Case(NamedTuple):
    """A conversation whose answer at `at` was sampled, and the words that it ends with."""

    messages: list[Message]
    at: int
    words: str
    tools: list[dict[str, Any]] | None = None


_DATA = cases_of(__file__)

CASES = {
    name: Case(
        [{"content": None, **_DATA["messages"][key]} for key in case["messages"].split()],
        case["at"],
        case["words"],
        [tool(), tool("now")] if "tools" in case else None,
    )
    for name, case in _DATA["cases"].items()
}
"""Shapes of conversations, by name."""

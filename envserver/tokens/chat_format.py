"""A model's chat format: its chat template and its vocabulary, messages <-> ids.

Everything here is pure: the same conversation gives the same text, unless the template uses the
time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError
from envserver_records.records import Message, Tokens

from .images import banned_tokens_of, image_token_of
from .prepare import RESERVED, KeptMessages, prepare, prepare_tools, with_defaults
from .template import ChatTemplate
from .vocabulary import CONFIG, Vocabulary, read_json

_SHAPES_KEPT = 65_536
_PROMPTS_KEPT = 64
_LONGEST_KEPT = 131_072
"""Texts whose ids are remembered, and their most characters: the rollouts of a group begin with
the same prompt. All together take 25 MB at most where a character takes a byte."""
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


class ChatFormat:
    """Renders and encodes; safe to share between attempts and threads.

    Args:
        vocabulary: the model's tokenizer.
        templates: the model's chat templates by name: `default`, and `tool_use` for conversations
            with tools where the model has one.
        stop_ids: ids that end the model's turn by its own configuration.
        defaults: template variables of every conversation; a request's own take precedence.
        image_token: what the template writes for an image; None: the model sees none.
        banned: tokens that must not be sampled, see `images.banned_tokens_of`.
        processor: digest of the files that say how images become tokens; "" without any.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        templates: Mapping[str, str],
        stop_ids: frozenset[int],
        defaults: Mapping[str, Any] | None = None,
        *,
        image_token: int | None = None,
        banned: tuple[int, ...] = (),
        processor: str = "",
    ) -> None:
        self.vocabulary = vocabulary
        self.stop_ids = stop_ids
        self.defaults = dict(defaults or {})
        self.image_token = image_token
        self.banned = banned
        self.processor = processor
        self.shapes: dict[bytes, str] = {}
        """Results of the checks in `shape`, by the shape of a conversation."""
        self._sources = dict(templates)
        self._templates = {
            name: ChatTemplate(source, vocabulary.variables) for name, source in templates.items()
        }
        self._tokens = lru_cache(maxsize=_PROMPTS_KEPT)(vocabulary.tokens)

    @classmethod
    def load(cls, folder: Path) -> ChatFormat:
        """Loads the format of the model in `folder`.

        Raises:
            ConfigError: `folder` has no tokenizer.json or no chat template, or they are unusable.
        """
        vocabulary = Vocabulary.load(folder)
        config = read_json(folder / "config.json")
        return cls(
            vocabulary,
            _read_templates(folder),
            _read_stop_ids(folder, vocabulary),
            image_token=image_token_of(config),
            banned=banned_tokens_of(config),
            processor=_processor_digest(folder),
        )

    def with_defaults(self, defaults: Mapping[str, Any]) -> ChatFormat:
        """Returns this format with other default variables."""
        return ChatFormat(
            self.vocabulary,
            self._sources,
            self.stop_ids,
            defaults,
            image_token=self.image_token,
            banned=self.banned,
            processor=self.processor,
        )

    @property
    def own_variables(self) -> list[str]:
        """Names of variables by which a request or the engine can change what is rendered."""
        read = {name for template in self._templates.values() for name in template.names}
        given = {*RESERVED, *self.vocabulary.variables, "documents", "add_generation_prompt"}
        return sorted(read - given)

    def remember(self, shape: bytes, found: str) -> None:
        """Adds to `shapes`, and clears it when it is full."""
        if len(self.shapes) >= _SHAPES_KEPT:
            self.shapes = {}
        self.shapes[shape] = found

    @property
    def template_digest(self) -> str:
        """Hex digest of the chat templates."""
        return "+".join(self._templates[name].digest for name in sorted(self._templates))

    @property
    def tokenizer_digest(self) -> str:
        """Hex digest of the tokenizer's files."""
        return self.vocabulary.digest

    def template(self, with_tools: bool) -> ChatTemplate:
        """Returns the template for conversations with or without tools."""
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        return self._templates[name]

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
        *,
        generation_prompt: bool,
        kept: KeptMessages | None = None,
    ) -> str:
        """Renders a conversation to text.

        Args:
            messages, tools: in OpenAI's chat shape, as an agent sends them.
            kwargs: template variables of the request (see `prepare.template_kwargs`).
            generation_prompt: end with what opens the model's next turn.
            kept: the prepared messages of the conversation's request before.

        Raises:
            TemplateRefused: the template rejects it.
            Refused: multimodal, unusual_message, unusual_tool: only the engine can render it.
        """
        template = self.template(bool(tools))
        return template.render(
            prepare(
                messages,
                parts=template.parts,
                developer=template.developer,
                images="refused" if self.image_token is None else "shown",
                kept=kept,
            ),
            prepare_tools(tools),
            generation_prompt=generation_prompt,
            kwargs=with_defaults(self.defaults, kwargs),
        )

    def prompt_text(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
        kept: KeptMessages | None = None,
    ) -> str:
        """Returns the prompt text of a chat request. Arguments and errors as of `render`."""
        own = {name: value for name, value in kwargs.items() if name != "add_generation_prompt"}
        asked = bool(kwargs.get("add_generation_prompt", True))
        return self.render(messages, tools, own, generation_prompt=asked, kept=kept)

    def prompt_ids(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> list[int]:
        """Returns the prompt's ids. Raises as `render`, and Refused for invalid Unicode."""
        ids: list[int] = self.tokens(self.prompt_text(messages, tools, kwargs)).tolist()
        return ids

    def tokens(self, text: str) -> Tokens:
        """Returns the ids of a whole prompt, which others may get, too: never change them.
        Raises Refused: invalid Unicode.
        """
        return (self._tokens if len(text) <= _LONGEST_KEPT else self.vocabulary.tokens)(text)

    def encode(self, text: str) -> list[int]:
        """See `Vocabulary.encode`."""
        return self.vocabulary.encode(text)

    def decode(self, ids: list[int]) -> str:
        """See `Vocabulary.decode`."""
        return self.vocabulary.decode(ids)


def _read_templates(folder: Path) -> dict[str, str]:
    """Reads the templates by name; separate files take precedence over the tokenizer's
    configuration."""
    found: Any = None
    alone, several = folder / "chat_template.jinja", folder / "additional_chat_templates"
    if alone.is_file():
        found = {"default": alone.read_text(encoding="utf-8")}
        for path in sorted(several.glob("*.jinja")):
            found[path.stem] = path.read_text(encoding="utf-8")
    else:
        found = read_json(folder / "chat_template.json").get("chat_template")
        found = found or read_json(folder / CONFIG).get("chat_template")
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}
    if not isinstance(found, dict) or not found:
        raise ConfigError(
            f"There is no chat template in {folder}.",
            hint=f"It should be in chat_template.jinja, chat_template.json or {CONFIG}.",
        )
    if "default" not in found:
        raise ConfigError(
            f"None of the chat templates in {folder} is named default.",
            hint=f"They are named {', '.join(sorted(found))}.",
        )
    return found


def _processor_digest(folder: Path) -> str:
    """Returns the digest of the files that configure the processor of images; "" without any."""
    found = [folder / name for name in _PROCESSORS if (folder / name).is_file()]
    digest = hashlib.blake2b(digest_size=16)
    for path in found:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest() if found else ""


def _read_stop_ids(folder: Path, vocabulary: Vocabulary) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    eos = vocabulary.special_id(vocabulary.variables.get("eos_token", ""))
    return frozenset(ids if eos is None else ids | {eos})

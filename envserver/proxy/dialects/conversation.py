"""Builds chat messages from the items of other dialects; takes answers apart. Pure.

The results of tool calls follow each other, and one answer of the model is one message. Images,
audio and video come only as `data:` addresses, within limits: an engine fetches another address
from its own place in the network or from its disk, which an agent must not reach.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import orjson
from envserver_records.errors import InputError
from envserver_records.records import Message

from ...settings.config import TokensConfig
from ...tokens.images import ImageFacts
from .base import bad

_REASONING = ("reasoning", "reasoning_content")
_TEXTS = ("content", "refusal")


class TextPart(NamedTuple):
    """A piece of the reasoning or of the text; never empty."""

    kind: Literal["reasoning", "text"]
    text: str


class ToolCall(NamedTuple):
    """A whole tool call; `arguments` as the engine gave them, usually JSON."""

    id: str
    name: str
    arguments: str


class AnswerEnd(msgspec.Struct):
    """How an answer ended, as far as known."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, Any] = msgspec.field(default_factory=dict)

    def take(self, answer: dict[str, Any]) -> None:
        choice = choice_of(answer)
        if choice.get("finish_reason"):  # some engines write "" before the end
            self.finish_reason = choice["finish_reason"]
        if choice.get("stop_reason") is not None:
            self.stop_reason = choice["stop_reason"]
        if isinstance(answer.get("usage"), dict):
            self.usage = answer["usage"]

    @property
    def is_whole(self) -> bool:
        return self.finish_reason in ("stop", "tool_calls", "function_call")

    @property
    def stop_string(self) -> str | None:
        return self.stop_reason if isinstance(self.stop_reason, str) else None

    def tokens(self, name: str) -> int:
        return self.usage.get(name) or 0

    def detail(self, name: str, detail: str) -> int:
        return (self.usage.get(name) or {}).get(detail) or 0


def ending_of(answer: dict[str, Any]) -> AnswerEnd:
    ending = AnswerEnd()
    ending.take(answer)
    return ending


def choice_of(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices") or [{}]
    choice: dict[str, Any] = choices[0]
    return choice


def parts_of(message: dict[str, Any]) -> Iterator[TextPart | ToolCall]:
    """Yields the parts of a message or of a chunk's delta: reasoning, text, tool calls."""
    for name in _REASONING:
        if message.get(name):
            yield TextPart("reasoning", message[name])
            break
    for name in _TEXTS:
        if message.get(name):
            yield TextPart("text", message[name])
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        yield ToolCall(
            call.get("id") or new_id("call"),
            function.get("name") or "",
            function.get("arguments") or "",
        )


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def named_event(data: dict[str, Any]) -> bytes:
    """Formats `data` as one server-sent event, named by its field `type`."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), orjson.dumps(data))


Part = dict[str, Any]
"""One part of a chat message's content: text or image_url."""


class Conversation:
    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._images: list[Part] = []

    def system(self, parts: list[Part]) -> None:
        self._show_images()
        self._messages.append({"role": "system", "content": content_of(parts)})

    def user(self, parts: list[Part]) -> None:
        """Adds a user message, preceded by images that tools returned."""
        parts = [*self._images, *parts]
        self._images = []
        self._messages.append({"role": "user", "content": content_of(parts)})

    def tool(self, call_id: str, parts: list[Part]) -> None:
        """Adds a tool's result, in chats a text: its images follow in a user message."""
        texts = [part for part in parts if part["type"] == "text"]
        self._images.extend(part for part in parts if part["type"] != "text")
        content = "\n".join(part["text"] for part in texts)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def assistant(
        self, *, reasoning: str = "", text: str = "", calls: Iterable[ToolCall] = ()
    ) -> None:
        self._show_images()
        self._messages.append(answer_message(reasoning, text, calls))

    def messages(self) -> list[Message]:
        self._show_images()
        return self._messages

    def _show_images(self) -> None:
        if self._images:
            self.user([])


def answer_message(reasoning: str, text: str, calls: Iterable[ToolCall]) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    tool_calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    if tool_calls:
        message["content"] = text or None
        message["tool_calls"] = tool_calls
    return message


def content_of(parts: list[Part]) -> str | list[Part]:
    """Returns `parts` as a message's content; a single text part becomes a string."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> Part:
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}


_HEAD = re.compile(r"data:([a-z]+)/[\w.+-]{1,64}(?:;[\w.=+-]{1,64}){0,4};base64,", re.I)
_MB = 1 << 20
_SNIFFED = 64
"""Characters of base64 that tell what a medium is."""
_ISO_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"})
_RIFF = {b"WEBP": "image", b"WAVE": "audio", b"AVI ": "video"}
_BEGINNINGS = {
    "image": (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*"),
    "audio": (b"ID3", b"fLaC", b"OggS", b"\x1aE\xdf\xa3", b"FORM", b"\xff"),
    "video": (b"\x1aE\xdf\xa3", b"OggS", b"FLV", b"\0\0\1\xba", b"\0\0\1\xb3", b"GIF8"),
}
"""Bytes with which files of each kind begin, besides RIFF's and those of MP4 and its relatives."""
_FORMATS = {
    "image": "PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF or HEIC",
    "audio": "WAV, MP3, FLAC, Ogg, WebM, AIFF, AAC or MP4",
    "video": "MP4, QuickTime, WebM, Matroska, AVI, Ogg, FLV, MPEG or GIF",
}
_FRAMES = "video/jpeg"
"""Images, separated by commas."""
_FORMAT = re.compile(r"[a-z0-9]{1,16}")


def media_part(part: dict[str, Any], place: str) -> dict[str, Any] | None:
    """Returns the checked fields of a media part of a chat message; None if `part` is not one."""
    kind = part.get("type")
    if kind == "input_audio":
        return {"type": kind, "input_audio": _audio(part.get(kind), f"{place}.{kind}")}
    if kind not in ("image_url", "audio_url", "video_url"):
        return None
    held = part.get(kind)
    if not isinstance(held, dict):
        raise bad(f"{place}.{kind}", "must be an object with its url")
    checked = {"url": data_url(held.get("url"), kind.removesuffix("_url"), f"{place}.{kind}.url")}
    if held.get("detail") is not None:
        checked["detail"] = detail(held["detail"], f"{place}.{kind}.detail")
    return {"type": kind, kind: checked}


def detail(given: Any, place: str) -> str:
    if given not in ("auto", "low", "high", "original"):
        raise bad(place, "must be auto, low, high or original")
    return str(given)


def data_url(url: Any, kind: str, place: str) -> str:
    """Returns `url` if it is a `data:` address that holds an image, audio or video (`kind`)."""
    if not isinstance(url, str):
        raise bad(place, "must be a text")
    head = _HEAD.match(url[:400])
    if head is None or head[1].lower() != kind:
        raise bad(
            place,
            f"must begin with data:{kind}/<type>;base64, and hold the bytes: the engine fetches"
            " nothing for an agent. Let the environment fetch it and pass it as data:",
        )
    if url[5:20].lower().startswith(_FRAMES):
        for frame in url[head.end() :].split(","):
            _check_first(frame[:_SNIFFED], "image", place)
    else:
        _check_first(url[head.end() : head.end() + _SNIFFED], kind, place)
    return url


def _audio(given: Any, place: str) -> dict[str, str]:
    if not isinstance(given, dict) or not isinstance(given.get("data"), str):
        raise bad(place, "must hold data: the bytes in base64")
    form = given.get("format")
    if not isinstance(form, str) or _FORMAT.fullmatch(form) is None:
        raise bad(f"{place}.format", "must be the name of a format, such as wav")
    _check_first(given["data"][:_SNIFFED], "audio", f"{place}.data")
    return {"data": given["data"], "format": form}


def check_media(messages: list[Message], limits: TokensConfig) -> None:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    held = [part[part["type"]] for part in parts if part["type"].endswith(("_url", "_audio"))]
    sizes = [len(medium.get("url") or medium["data"]) * 3 // 4 for medium in held]
    if len(sizes) > limits.max_media:
        raise _over(f"{len(sizes)} images, audio and videos", limits.max_media, "max_media")
    for number, size in enumerate(sizes, 1):
        if size > limits.max_medium_mb * _MB:
            about = f"image, audio or video number {number} with {size / _MB:.1f} MB"
            raise _over(about, f"{limits.max_medium_mb:g} MB", "max_medium_mb")
    if sum(sizes) > limits.max_media_mb * _MB:
        about = f"images, audio and videos of {sum(sizes) / _MB:.1f} MB together"
        raise _over(about, f"{limits.max_media_mb:g} MB", "max_media_mb")


def check_images(images: list[ImageFacts], limits: TokensConfig) -> None:
    """Checks that the images of a request are intact and within the limits of pixels."""
    pixels = 0.0
    for number, facts in enumerate(images, 1):
        if not facts.is_base64:
            raise bad("messages", f"hold image number {number}, which is not base64 to its end")
        if facts.size is None or not all(facts.size):
            raise bad(
                "messages", f"hold image number {number}, whose file is damaged: it has no size"
            )
        width, height = facts.size
        megapixels = width * height / 1e6
        pixels += megapixels
        if megapixels > limits.max_image_megapixels:
            about = f"image number {number} with {width} times {height} pixels"
            most = f"{limits.max_image_megapixels:g} million"
            raise _over(about, most, "max_image_megapixels")
    if pixels > limits.max_images_megapixels:
        about = f"images of {pixels:.0f} million pixels together"
        raise _over(about, f"{limits.max_images_megapixels:g} million", "max_images_megapixels")


def _over(about: str, most: object, setting: str) -> InputError:
    return bad("messages", f"hold {about}: {most} at most (--tokens.{setting})")


def _check_first(head: str, kind: str, place: str) -> None:
    try:
        first = base64.b64decode(head, validate=True)
    except (binascii.Error, ValueError):
        raise bad(place, "is not base64") from None
    if not _is_known(first, kind):
        raise bad(place, f"is not {_FORMATS[kind]}")


def _is_known(first: bytes, kind: str) -> bool:
    if first[:4] == b"RIFF":
        return _RIFF.get(first[8:12]) == kind
    return first[4:8] in _ISO_BOXES or first.startswith(_BEGINNINGS[kind])

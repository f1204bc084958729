"""Images that agents send, over HTTP: each attack is a clear 400, and the server stays awake."""

from __future__ import annotations

import base64
import io
import struct
import threading
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.extent import examples
from support.proxy_house import chat, house

from envserver import TokensConfig
from envserver.tokens import images
from envserver.tokens.image_size import image_size

Json = dict[str, Any]


def png(width: int, height: int, body: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def part(data: bytes | str, kind: str = "image/png") -> Json:
    if isinstance(data, bytes):
        data = f"data:{kind};base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": data}}


SMALL = png(8, 8)
MEGABYTE = png(8, 8, bytes(1 << 20))
GIF = b"GIF89a\1\0\1\0\0\0\0" + b"!\xf9\4\0\0\0\0\0" + b",\0\0\0\0"  # then the frame's size


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([part(MEGABYTE)] * 3, "images, audio and videos of 3.0 MB together: 2 MB at most"),
        ([part(SMALL), part(png(8, 8, bytes(3 << 19)))], "number 2 with 1.5 MB: 1.25 MB at most"),
        ([part(SMALL)] * 10_000, "hold 10000 images, audio and videos: 256 at most"),
        ([part(SMALL), part(png(60_000, 60_000))], "number 2 with 60000 times 60000 pixels"),
        ([part(png(9_000, 9_000))] * 5, "images of 405 million pixels together: 400 million"),
        ([part(GIF + b"\xff\xff\xff\xff\0", "image/gif")], "65535 times 65535 pixels"),
        ([part(part(MEGABYTE)["image_url"]["url"][:-100] + "!!!!")], "not base64 to its end"),
        ([part(part(MEGABYTE)["image_url"]["url"] + "AAAA")], "not base64 to its end"),
        ([part(SMALL[:20])], "whose file is broken"),
        ([part(png(0, 8))], "whose file is broken"),
        ([part("data:image/png;base64,")], "is not PNG, JPEG"),
        ([part("http://example.com/a.png")], "must begin with data:image/"),
        ([part(SMALL, "audio/png")], "must begin with data:image/"),
        ([{"type": "image_url", "image_url": {"url": 5}}], "must be a text"),
        ([part(SMALL), "text", 5], "content[1] must be an object"),
    ],
)
async def test_hostile_images_are_refused_with_the_reason(parts: list[Json], said: str) -> None:
    tokens = TokensConfig(max_medium_mb=1.25, max_media_mb=2)
    async with house(max_body_bytes=16_000_000, tokens=tokens) as home:
        attempt, _ = home.open()
        body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
        status, answer = await home.post(attempt.key, "v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (400, "input")
        assert said in answer["error"]["message"]
        assert home.fake.requests == [] and attempt.calls == []


async def test_the_limits_are_settings() -> None:
    tokens = TokensConfig(max_media=1, max_image_megapixels=0.5)
    async with house(tokens=tokens) as home:
        attempt, client = home.open()
        await chat(client, messages=[{"role": "user", "content": [part(SMALL)]}])
        for refused, setting in (([part(SMALL)] * 2, "max_media"),
                                 ([part(png(800, 800))], "max_image_megapixels")):  # fmt: skip
            body = {"model": "m", "messages": [{"role": "user", "content": refused}]}
            status, answer = await home.post(attempt.key, "v1/chat/completions", body)
            assert status == 400 and f"(--tokens.{setting})" in answer["error"]["message"]


async def test_a_large_image_is_read_once_and_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[tuple[int, bool]] = []
    facts = images._facts

    def counted(url: str) -> images.ImageFacts:
        read.append((len(url), threading.current_thread() is threading.main_thread()))
        return facts(url)

    monkeypatch.setattr(images, "_facts", counted)
    large = part(png(8, 8, b"another" * 30_000))
    async with house(max_body_bytes=16_000_000) as home:
        _, client = home.open()
        messages: list[Json] = [{"role": "user", "content": [large]}]
        for _ in range(3):
            answer = await chat(client, messages=messages)
            messages += [answer.message.model_dump(exclude_none=True), messages[0]]
    assert [on_loop for size, on_loop in read if size > images._LARGE] == [False]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
def test_the_size_of_every_format_is_known(form: str) -> None:
    kept = io.BytesIO()
    exif = {"exif": b"Exif\0\0" + bytes(50_000)} if form == "JPEG" else {}
    Image.new("RGB", (123, 45), "red").save(kept, form, **exif)
    assert size_of(kept.getvalue()) == (123, 45)
    facts = images.facts_of(images.url_from(kept.getvalue()))
    assert (facts.size, facts.is_base64) == ((123, 45), True)


def test_a_gif_of_millions_of_parts_costs_no_seconds() -> None:
    reads: list[int] = []

    def read(at: int, size: int) -> bytes:
        reads.append(at)
        return (GIF[:13] + b"!\xfe" + b"\1a" * 30_000)[at : at + size]

    assert image_size(read) is None
    assert len(reads) < 20_000


@given(data=st.binary(max_size=300), start=st.sampled_from([b"\xff\xd8", b"GIF89a", b"II*\0", b""]))
@settings(max_examples=examples(100), deadline=None)
def test_no_bytes_break_the_reading_of_sizes(data: bytes, start: bytes) -> None:
    found = size_of(start + data)
    assert found is None or all(side >= 0 for side in found)


@given(data=st.binary(max_size=3000), cut=st.integers(0, 40))
@settings(max_examples=examples(100), deadline=None)
def test_facts_in_steps_are_those_of_the_whole(data: bytes, cut: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_STEP", 64)
        url = images.url_from(data)[: -cut or None]
        facts = images._facts(url)
    assert facts.sha256 == images.sha256_of(images.bytes_of(url))
    assert facts.is_base64 == (images.bytes_of(url) != url.encode() or not url)


def size_of(data: bytes) -> tuple[int, int] | None:
    return image_size(lambda at, size: data[at : at + size])

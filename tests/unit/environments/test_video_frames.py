"""Frames of real video files in `video`: which are shown, and what hostile files can do."""

import asyncio
import base64
import io
import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.video.data_sets import Folder, VideoQuestion, video_file
from envserver_environments.video.env import Video
from envserver_environments.video.frames import confine, store
from envserver_environments.video.frames.decoding import Request, moments
from envserver_environments.video.frames.store import (
    Broken,
    FrameLimits,
    FrameStore,
    Shown,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.cases import cases_of, write_jsonl
from support.cpu import cpu_limit
from support.extent import examples
from support.films import COLOURS, film

import envserver
from envserver import ConfigError, InputError, NotFoundError

CASES = cases_of(__file__)

FORMS = ("jpg", "png", "webp")
SMALL = FrameLimits(count=3, side=32, cpu_seconds=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("av")
    made = tmp_path_factory.mktemp("films")
    film(made / "film.mp4")
    return made


def frames_of(folder: Path, limits: FrameLimits = SMALL, **how: Any) -> FrameStore:
    return FrameStore(folder, limits, **{"file_mb": 10, "kept_mb": 10, **how})


def picture(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head == "data:image/jpeg;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def colours(shown: Shown) -> list[str]:
    """The colour nearest to the middle of each frame."""
    found = []
    for _, url in shown.frames:
        image = picture(url)
        middle = image.getpixel((image.width // 2, image.height // 2))
        assert isinstance(middle, tuple)
        found.append(min(COLOURS, key=lambda name: distance(COLOURS[name], middle)))
    return found


def distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


async def test_frames_are_those_of_their_times_and_decoded_once(folder: Path) -> None:
    frames = frames_of(folder)
    all_of_it, again = await asyncio.gather(*(frames.frames("film.mp4", 0, None) for _ in "ab"))
    assert [time for time, _ in all_of_it.frames] == [1.0, 3.0, 5.0]
    assert (all_of_it.seconds, colours(all_of_it)) == (6.0, ["red", "green", "blue"])
    assert picture(all_of_it.frames[0][1]).size == (32, 24)
    part = await frames.frames("film.mp4", 4, 5.5)
    assert colours(part) == ["blue"] * 3 and all(4 <= time <= 5.5 for time, _ in part.frames)
    assert (await frames.frames("film.mp4", 100, None)).frames == ()
    assert again is all_of_it and frames.counts() == {"frames_decoded": 3.0}
    with (folder / "film.mp4").open("ab"):
        os.utime(folder / "film.mp4", (1, 1))  # another file of the same name is another video
    assert colours(await frames.frames("film.mp4", 0, None)) == ["red", "green", "blue"]
    assert frames.counts() == {"frames_decoded": 4.0}


async def test_a_folder_of_frames_is_a_video(folder: Path) -> None:
    (folder / "deep" / "v_still").mkdir(parents=True)
    for number, (form, colour) in enumerate(zip(FORMS, COLOURS, strict=False), start=8):
        picture = Image.new("RGB", (64, 48), COLOURS[colour])
        picture.save(folder / "deep" / "v_still" / f"{number}.{form}")
    name = video_file(Folder(folder), VideoQuestion("?", "still"))
    frames = frames_of(folder, pictures_per_second=0.5)
    shown = await frames.frames(name, 0, None)
    assert [time for time, _ in shown.frames] == [0.0, 2.0, 4.0] and shown.seconds == 6.0
    assert colours(shown) == list(COLOURS)[:3]
    part = await frames.frames(name, 4, None)
    assert colours(part) == list(COLOURS)[2:3]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["a.mkv", "a.webm", "a.avi", "a.ts", "a.mov", "a.flv"])
async def test_usual_containers_are_read(folder: Path, name: str) -> None:
    film(folder / name, codec={"webm": "libvpx-vp9", "flv": "flv"}.get(name[2:], "mpeg4"))
    shown = await frames_of(folder).frames(name, 0, None)
    assert colours(shown) == ["red", "green", "blue"]
    assert abs(shown.seconds - 6) < 0.5


@pytest.mark.thorough
async def test_a_video_of_four_hours_costs_little(folder: Path) -> None:
    film(folder / "long.mp4", 4 * 3600, rate=Fraction(1, 4), size=(32, 32))
    limits = FrameLimits(count=8, side=32, cpu_seconds=math.ceil(cpu_limit(3)))
    shown = await frames_of(folder, limits).frames("long.mp4", 0, None)
    assert shown.seconds == 4 * 3600
    assert [round(time) for time, _ in shown.frames] == [900 + 1800 * place for place in range(8)]


@pytest.mark.thorough
async def test_a_video_held_upright_is_shown_upright(folder: Path) -> None:
    data = bytearray((folder / "film.mp4").read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    quarter = (0, 1 << 16, 0, -(1 << 16), 0, 0)  # clockwise
    data[matrix : matrix + 24] = b"".join(one.to_bytes(4, "big", signed=True) for one in quarter)
    (folder / "upright.mp4").write_bytes(data)
    limits = FrameLimits(count=1, side=64)
    ((_, url),) = (await frames_of(folder, limits).frames("upright.mp4", 0, None)).frames
    image = picture(url).convert("L")
    assert image.size == (48, 64)
    left, right = image.getpixel((1, 1)), image.getpixel((46, 1))
    assert isinstance(left, int) and isinstance(right, int) and right < 80 < 200 < left


HLS = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("list.mp4", HLS.encode(), "cannot be decoded"),
        ("gone.mp4", None, "No such file"),
        ("../film.mp4", None, "not in the folder"),
        ("large.mp4", bytes(2 << 20), "larger than 1 MB"),
    ],
)
async def test_what_is_no_video_says_so(
    folder: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    frames = frames_of(folder, file_mb=1)
    for _ in range(2):
        with pytest.raises(Broken, match=said):
            await frames.frames(name, 0, None)
    assert frames.counts()["frames_decoded"] <= 1  # a broken file is remembered, too


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (FrameLimits(max_pixels=3_000), "64 times 48 pixels: too many"),
        (FrameLimits(memory_mb=64), "takes? .*64 MB"),
        (FrameLimits(cpu_seconds=1, count=600), "1 seconds of processor time"),
    ],
)
async def test_limits_end_a_decoder(folder: Path, change: FrameLimits, said: str) -> None:
    name = "film.mp4"
    if change.cpu_seconds == 1:
        name = "slow.mp4"
        film(folder / name, 3000, rate=1, keyframe_every=10_000, codec="libx264")
    with pytest.raises(Broken, match=said):
        await frames_of(folder, change).frames(name, 0, None)


@pytest.mark.thorough
@given(
    cuts=st.lists(st.tuples(st.integers(0, 5_000), st.binary(min_size=1, max_size=8)), max_size=9)
)
@settings(max_examples=examples(12), deadline=None)
def test_damaged_videos_give_frames_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[tuple[int, bytes]]
) -> None:
    place = tmp_path_factory.mktemp("damaged")
    data = bytearray(film(place / "film.mp4").read_bytes())
    for at, some in cuts:
        data[at % len(data) : at % len(data) + len(some)] = some
    (place / "film.mp4").write_bytes(data)
    try:
        shown = asyncio.run(frames_of(place).frames("film.mp4", 0, None))
    except Broken:
        return
    assert all(picture(url).size[0] <= 32 for _, url in shown.frames)


def test_a_confined_process_reaches_nothing() -> None:
    place = str(Path(confine.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-I", "-c", CASES["reaches"], place],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [*["1"] * 7, "held"], done.stderr


@given(
    seconds=st.floats(0.1, 1e5),
    start=st.floats(0, 1e5),
    end=st.none() | st.floats(0, 1e6),
    count=st.integers(1, 64),
    every=st.none() | st.floats(0.01, 1e4),
)
@settings(max_examples=examples(100), deadline=None)
def test_moments_are_within_the_part_and_in_order(
    seconds: float, start: float, end: float | None, count: int, every: float | None
) -> None:
    request = Request(count, every, start=start, end=end)
    found = moments(seconds, request)
    last = min(seconds, seconds if end is None else end)
    assert 1 <= len(found) <= count
    assert all(min(start, last) <= time <= last for time in found)
    assert all(one <= other for one, other in pairwise(found))


def test_every_two_seconds_is_every_two_seconds() -> None:
    assert moments(10, Request(8, 2.0)) == [1, 3, 5, 7, 9]
    assert len(moments(100, Request(8, 2.0))) == 8


# The environment


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    path = write_jsonl(folder / "rows.jsonl", CASES["rows"])
    return {"data_set": "captions", "data_path": path, "frame_count": 3, "frame_side": 32,
            "shuffle_options": False, **changes}  # fmt: skip


def test_rows_name_files_in_the_folder_and_others_are_dropped(folder: Path) -> None:
    videos = Video(Video.Config(**config(folder, frames="all")))
    tasks = {task.id: task.public for task in videos.tasks("train")}
    assert {name: public["file"] for name, public in tasks.items()} == {
        "captions-0": "film.mp4", "captions-1": "film.mp4"}  # fmt: skip
    assert (tasks["captions-0"]["context"], "captions" in tasks["captions-1"]["context"]) == (
        None, True)  # fmt: skip
    assert videos.rows.dropped == {"there is no video file of its video": 2}
    # Without frames, a row without captions is of no use, as before.
    only_text = Video(Video.Config(**config(folder)))
    assert [task.id for task in only_text.tasks("train")] == ["captions-1"]
    for bad in ("a\0b", "x" * 5000, "/etc/passwd"):
        with pytest.raises(InputError):
            video_file(Folder(folder), VideoQuestion("?", "", file=bad))


def test_frames_need_a_folder_and_pyav(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError, match="no folder of videos"):
        Video(Video.Config(frames="all", videos_path=tmp_path / "x")).services()
    monkeypatch.setattr(store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package av"):
        Video(Video.Config(**config(folder, frames="all"))).services()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("frames", "mode", "protocol"),
    [("all", "single", "tools"), ("tool", "single", "text"), ("tool", "report", "tools")],
)
def test_agents_see_frames_and_solve_their_tasks(
    folder: Path, frames: str, mode: str, protocol: str
) -> None:
    env = config(folder, frames=frames, mode=mode, protocol=protocol)
    groups = list(
        envserver.groups(
            "video",
            model="sim",
            sim={"solve_probability": 1.0},
            env={**env, "group_size": 1, "total_steps": 2},
        )
    )
    assert len(groups) == 2
    for group in groups:
        (rollout,) = group.trajectories
        assert rollout.score.reward == 1
        shown = [
            part["image_url"]["url"]
            for messages in [rollout.messages, *(one.messages for one in rollout.others)]
            for message in messages
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image_url"
        ]
        assert len(shown) >= 3 and all(picture(url).size == (32, 24) for url in shown)


@pytest.mark.thorough
def test_a_broken_file_is_no_reward_of_0_and_names_its_row(folder: Path, tmp_path: Path) -> None:
    (folder / "broken.mp4").write_bytes(b"no video")
    env = config(folder, frames="all")
    row = {"file": "broken.mp4", "question": "What?", "answer": "x"}
    env["data_path"].write_text(json.dumps(row) + "\n")
    made = {"group_size": 1, "total_steps": 1}
    out = tmp_path / "out.jsonl"
    with pytest.raises(envserver.EnvserverError, match="service_error"):
        list(envserver.groups("video", model="sim", out=str(out), env={**env, **made}))
    assert not out.exists() or not out.read_text()
    told = "".join(path.read_text() for path in tmp_path.glob("*fail*"))
    assert "'broken.mp4' of task 'captions-0' cannot be shown: it cannot be decoded" in told

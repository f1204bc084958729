"""`envserver merge --save_vector`: the task vector as a file, and what it is added to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from support.models_on_disk import EMBEDDING, floats, read_model, same_bits, weights, write_model

from envserver import main


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F64"])
def test_a_saved_vector_merges_like_its_models(tmp_path: Path, dtype: str) -> None:
    base, sft, rl = (
        write_model(tmp_path / name, weights(seed, dtype), shards=[[EMBEDDING], rest])
        for seed, name in enumerate(("base", "sft", "rl"))
        for rest in [[name for name in weights(0) if name != EMBEDDING]]
    )
    out, again, file = tmp_path / "out", tmp_path / "again", tmp_path / "vectors" / "rl.safetensors"
    models = ["merge", "--base", str(base), "--sft", str(sft), "--rl", str(rl)]
    assert main([*models, "--alpha", "0.5", "--out", str(out), "--save_vector", str(file)]) == 0
    vector = ["merge", "--base", str(base), "--add", str(file), "--alpha", "0.5"]
    assert main([*vector, "--out", str(again)]) == 0
    merged, other = read_model(out / "alpha-0.5"), read_model(again / "alpha-0.5")
    assert merged.keys() == other.keys() == weights(0).keys()
    assert all(same_bits(merged[name][1], other[name][1]) for name in merged)
    with safetensors.safe_open(file, "numpy") as stored_vector:
        for name, (_, values) in weights(2, dtype).items():
            difference = floats((dtype, values)) - floats(weights(1, dtype)[name])
            assert same_bits(stored_vector.get_tensor(name), difference)


def test_a_vector_of_several_parts_is_their_sum(three: dict[str, Path], tmp_path: Path) -> None:
    file, half = tmp_path / "sum.safetensors", tmp_path / "half.safetensors"
    base, sft, rl = (str(three[name]) for name in ("base", "sft", "rl"))
    assert main(["merge", "--base", base, "--add", f"{sft}=2", "--add", f"{rl}=-1",
                 "--save_vector", str(file)]) == 0  # fmt: skip
    assert main(["merge", "--base", base, "--add", f"{file}=0.5", "--save_vector", str(half)]) == 0
    first, second = (safetensors.numpy.load_file(path) for path in (file, half))
    for name, (_, start) in weights(0).items():
        s, r = (floats(weights(seed)[name]) for seed in (1, 2))
        np.testing.assert_allclose(first[name], 2 * (s - start) - (r - start), atol=1e-6)
        assert same_bits(second[name], first[name] * np.float32(0.5))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--add", "{sft}/model.safetensors", "--out", "{out}"], "is not a task vector"),
        (["--rl", "{vector}", "--sft", "{sft}", "--out", "{out}"], "is a difference already"),
        (["--add", "{vector}", "--save_vector", "{vector}"], "Replace it by --overwrite"),
        (["--add", "{sft}", "--save_vector", "{base}/config.json", "--overwrite"], "another file"),
        (["--add", "{sft}", "--alpha", "0.5", "--save_vector", "{out}"], "--out DIR is needed"),
        (["--add", "{sft}"], "--out DIR is needed"),
        (["--add", "{vector}", "--method", "ties", "--out", "{out}"], "not the file of a task"),
    ],
)
def test_vectors_that_are_refused(
    more: list[str], why: str, three: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    places = {**three, "vector": tmp_path / "v.safetensors", "out": tmp_path / "out"}
    base = ["merge", "--base", str(three["base"])]
    assert main([*base, "--add", str(three["rl"]), "--save_vector", str(places["vector"])]) == 0
    before = sorted(tmp_path.rglob("*"))
    assert main([*base, *(word.format(**places) for word in more)]) == 2
    assert why in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.rglob("*")) == before

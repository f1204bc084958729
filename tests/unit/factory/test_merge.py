"""`envserver merge`: what is written equals the formula, and models that do not fit are refused."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envserver_factory import Recipe, Vector, merge
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.models_on_disk import (
    COLUMNS,
    CONFIG,
    EMBEDDING,
    HEAD,
    Stored,
    bfloat16,
    floats,
    numbers,
    read_model,
    same_bits,
    stored,
    weights,
    write_file,
    write_model,
)

from envserver import main


def words(folders: dict[str, Path], out: Path, *more: str) -> list[str]:
    flags = [word for name, folder in folders.items() for word in (f"--{name}", str(folder))]
    return ["merge", *flags, "--out", str(out), *more]


# The formula --------------------------------------------------------------------------------------

DTYPES = st.sampled_from(["F64", "F32", "F16", "BF16"])
ALPHAS = st.floats(-2, 2, width=32)


@settings(max_examples=15, deadline=None)
@given(
    dtypes=st.tuples(DTYPES, DTYPES, DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=3),
    alphas=st.lists(ALPHAS, min_size=1, max_size=3, unique=True),
    weight=ALPHAS,
    seed=st.integers(0, 10_000),
)
def test_every_value_is_the_formula_rounded_once(
    tmp_path_factory: pytest.TempPathFactory,
    dtypes: tuple[str, str, str],
    shape: list[int],
    alphas: list[float],
    weight: float,
    seed: int,
) -> None:
    place = tmp_path_factory.mktemp("merge")
    models = [{"w": stored(numbers(seed + i, *shape), dtypes[i])} for i in range(3)]
    base, sft, rl = (write_model(place / str(i), one) for i, one in enumerate(models))
    recipe = Recipe(base, (Vector(rl, sft), Vector(rl, None, weight)), tuple(alphas))
    made = merge(recipe, [place / f"out-{i}" for i in range(len(alphas))])
    wide = np.float64 if dtypes[0] == "F64" else np.float32
    b, s, r = (floats(one["w"]) for one in models)
    first, second = r.astype(wide) - s.astype(wide) if wide == np.float64 else r - s, r - b
    for alpha, folder in zip(alphas, made.folders, strict=True):
        total = b + first * first.dtype.type(alpha)
        total = total + second * second.dtype.type(alpha * weight)
        dtype, values = read_model(folder)["w"]
        assert (dtype, values.dtype) == (dtypes[0], stored(total, dtypes[0])[1].dtype)
        assert same_bits(values, stored(total, dtypes[0])[1])


@settings(max_examples=examples(50), deadline=None)
@given(st.floats(width=32, allow_nan=False))
def test_bfloat16_is_rounded_to_nearest_even(value: float) -> None:
    from envserver_factory.merging.dtypes import decoded, encoded

    values = np.array([value], dtype=np.float32)
    bits = encoded(values, "BF16")
    if np.isfinite(value):
        assert bits == bfloat16(values)
    assert same_bits(encoded(decoded(bits.tobytes(), "BF16"), "BF16"), bits)


def test_two_alphas_in_one_pass(three: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert main(words(three, out, "--alpha", "0.5,1.0")) == 0
    assert capsys.readouterr().out.split() == [str(out / "alpha-0.5"), str(out / "alpha-1.0")]
    models = {name: read_model(folder) for name, folder in three.items()}
    for alpha in (0.5, 1.0):
        merged = read_model(out / f"alpha-{alpha}")
        for name, (dtype, base) in models["base"].items():
            vector = models["rl"][name][1] - models["sft"][name][1]
            assert same_bits(merged[name][1], base + vector * np.float32(alpha))
            assert dtype == merged[name][0]
    assert sorted(path.name for path in out.iterdir()) == ["alpha-0.5", "alpha-1.0"]
    for copied in (
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        assert (out / "alpha-0.5" / copied).read_bytes() == (three["base"] / copied).read_bytes()


def test_shards_and_what_is_no_float_stay_as_in_the_base(tmp_path: Path) -> None:
    steps = ("I64", np.arange(6))
    models = [{**weights(seed, "BF16"), "steps": steps} for seed in range(2)]
    names = list(models[0])
    base = write_model(tmp_path / "base", models[0], shards=[names[:2], names[2:]])
    other = write_model(tmp_path / "other", models[1])
    out = tmp_path / "out"
    assert main(["merge", "--base", str(base), "--add", f"{other}=0.0", "--out", str(out)]) == 0
    for file in base.glob("*.safetensors"):
        assert (out / file.name).read_bytes() == file.read_bytes()
    index = "model.safetensors.index.json"
    assert json.loads((out / index).read_text()) == json.loads((base / index).read_text())


def test_the_card_says_how_it_was_made(three: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(words(three, out, "--alpha", "0.3", "--add", f"{three['rl']}=-0.2")) == 0
    card = (out / "alpha-0.3" / "README.md").read_text()
    assert "base + 0.3 * ((rl - sft) + -0.2 * (rl - base))" in card
    assert str(tmp_path) not in card
    recipe = json.loads((out / "alpha-0.3" / "merge.json").read_text())
    assert [one["name"] for one in recipe["inputs"]] == ["base", "rl", "sft"]
    assert recipe["alpha"] == 0.3 and set(recipe["versions"]) >= {"envserver", "numpy"}
    import hashlib

    for folder, files in (
        (three["rl"], recipe["inputs"][1]["files"]),
        (out / "alpha-0.3", recipe["files"]),
    ):
        for name, digest in files.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Peak of a merge of three models for two alphas, against the largest of very many tensors."""
    largest = 4 << 20
    tensors = {f"layer.{i}.weight": ("F32", np.zeros((256, 1024), np.float32)) for i in range(24)}
    tensors["embed_tokens.weight"] = ("F32", np.zeros((largest // 1024, 1024), np.float32))
    base = write_model(tmp_path / "base", tensors)
    others = [tmp_path / name for name in ("sft", "rl")]
    for other in others:
        shutil.copytree(base, other, copy_function=shutil.copyfile)
    whole = sum(values.nbytes for _, values in tensors.values())
    del tensors
    recipe = Recipe(base, (Vector(others[1], others[0]),), (0.5, 1.0))
    tracemalloc.start()
    merge(recipe, [tmp_path / "a", tmp_path / "b"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * largest * 4 < whole


@pytest.mark.slow
def test_a_process_needs_no_memory_for_weights(tmp_path: Path, tell: Callable[[str], None]) -> None:
    """The whole process's, with a model of 600 MB and one tensor of 200 MB (all zeros, sparse)."""
    shapes = {f"layers.{i}.weight": [4096, 1024] for i in range(50)}
    shapes["embed_tokens.weight"] = [100_000, 1024]
    for name in ("base", "sft", "rl"):
        write_zeros(tmp_path / name, shapes)
    program = (
        "import sys; from envserver import main; peak = lambda: next(line.split()[1] for line in "
        "open('/proc/self/status') if line.startswith('VmHWM')); before = peak(); "
        "assert main(sys.argv[1:]) == 0; print(before, peak())"
    )
    folders = {name: tmp_path / name for name in ("base", "sft", "rl")}
    command = [sys.executable, "-c", program, *words(folders, tmp_path / "out", "--alpha", "0.5")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, peak = (int(one) for one in done.stdout.split()[-2:])
    tell(f"merging three models of 600 MB took {(peak - before) / 1024:.0f} MB of memory")
    assert (peak - before) * 1024 < 150_000_000


def write_zeros(folder: Path, shapes: dict[str, list[int]]) -> None:
    folder.mkdir()
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


# Models that do not fit ---------------------------------------------------------------------------


def config(folder: Path, **changes: Any) -> None:
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, **changes}))


def tensors(folder: Path, change: Callable[[dict[str, Stored]], Any]) -> None:
    found = read_model(folder)
    change(found)
    write_file(folder / "model.safetensors", found)


def tokens(folder: Path, **changes: int) -> None:
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    said["model"]["vocab"].update(changes)
    path.write_text(json.dumps(said))


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shape": (
        lambda rl: tensors(
            rl, lambda t: t.update({"model.norm.weight": stored(numbers(1, 5), "F32")})
        ),
        "model.norm.weight: [4] and [5]",
    ),
    "missing": (lambda rl: tensors(rl, lambda t: t.pop("model.norm.weight")), "rl lacks tensors"),
    "extra": (
        lambda rl: tensors(rl, lambda t: t.update(x=t[HEAD])),
        "rl has tensors that the base",
    ),
    "untied": (
        lambda rl: (tensors(rl, lambda t: t.pop(HEAD)), config(rl, tie_word_embeddings=False)),
        "rl lacks tensors of the base: lm_head.weight",
    ),
    "tied in name only": (
        lambda rl: config(rl, tie_word_embeddings=True),
        "stores another lm_head",
    ),
    "architecture": (lambda rl: config(rl, model_type="qwen2"), 'model_type: "llama" and "qwen2"'),
    "config": (lambda rl: config(rl, rope_theta=1e6), "rope_theta: 10000.0 and 1000000.0"),
    "quantised": (lambda rl: config(rl, quantization_config={}), "rl is quantised"),
    "vocabulary": (lambda rl: tokens(rl, b=0, c=1), "token 'b': 1 in the base, 0 here"),
    "not finite": (
        lambda rl: tensors(
            rl, lambda t: t.update({HEAD: stored(numbers(1, 6, 4) * np.inf, "F32")})
        ),
        "lm_head.weight has values that are not finite F32",
    ),
    "cut off": (lambda rl: cut(rl / "model.safetensors", 40), "or the file is cut off"),
    "no weights": (
        lambda rl: (rl / "model.safetensors").unlink(),
        "holds neither model.safetensors",
    ),
    "integers": (
        lambda rl: tensors(rl, lambda t: t.update({HEAD: ("I64", np.zeros((6, 4), np.int64))})),
        "lm_head.weight: F32 and I64",
    ),
}


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


@pytest.mark.parametrize("case", WRONG)
def test_models_that_do_not_fit(
    case: str, three: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    change, said = WRONG[case]
    change(three["rl"])
    assert main(words(three, tmp_path / "out" / "deep", "--alpha", "1")) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("out/**/*.safetensors"))
    assert not list(tmp_path.glob("out/**/.merging-*"))


@pytest.mark.parametrize(
    ("case", "flag"),
    [
        ("missing", "missing_tensors"),
        ("extra", "missing_tensors"),
        ("config", "config_differences"),
        ("vocabulary", "tokenizer_differences"),
        ("not finite", "not_finite"),
    ],
)
def test_what_may_be_allowed(
    case: str, flag: str, three: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    WRONG[case][0](three["rl"])
    out = tmp_path / "out"
    assert main(words(three, out, f"--allow_{flag}")) == 0
    merged, base = read_model(out), read_model(three["base"])
    assert set(merged) == set(base)
    if case == "missing":
        assert same_bits(merged["model.norm.weight"][1], base["model.norm.weight"][1])


def test_all_reasons_are_told_at_once(three: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    for case in ("missing", "config", "vocabulary"):
        WRONG[case][0](three["rl"])
    assert main(words(three, tmp_path / "out")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert all(WRONG[case][1] in said for case in ("missing", "config", "vocabulary"))


def test_an_output_layer_that_is_not_stored_is_the_embedding(tmp_path: Path) -> None:
    base, other = weights(0), weights(1)
    del other[HEAD]
    folders = [write_model(tmp_path / "base", base), write_model(tmp_path / "other", other)]
    merge(Recipe(folders[0], (Vector(folders[1]),)), [tmp_path / "out"])
    merged = read_model(tmp_path / "out")
    expected = base[HEAD][1] + (other[EMBEDDING][1] - base[HEAD][1]) * np.float32(1)
    assert same_bits(merged[HEAD][1], expected)


def test_tied_layers_stay_equal(tmp_path: Path) -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    base, other = weights(0), weights(1)
    base[HEAD] = base[EMBEDDING]
    del other[HEAD]
    folders = [
        write_model(tmp_path / "base", base, config=tied),
        write_model(tmp_path / "other", other, config=tied),
    ]
    merge(Recipe(folders[0], (Vector(folders[1], None, 0.3),)), [tmp_path / "out"])
    merged = read_model(tmp_path / "out")
    assert same_bits(merged[HEAD][1], merged[EMBEDDING][1])


# Adapters -----------------------------------------------------------------------------------------


def write_adapter(folder: Path, pairs: dict[str, np.ndarray], **said: Any) -> Path:
    folder.mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "fan_in_fan_out": False, **said}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    names = {f"base_model.model.{name}": ("F32", values) for name, values in pairs.items()}
    write_file(folder / "adapter_model.safetensors", names)
    return folder


def test_an_adapter_is_merged_into_the_base(tmp_path: Path, capsys: Any) -> None:
    base = write_model(tmp_path / "base", weights(0))
    module = "model.layers.0.mlp.up_proj"
    a, b, norm = numbers(1, 2, COLUMNS), numbers(2, 5, 2), numbers(3, COLUMNS)
    lora = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b, "model.norm.weight": norm}
    adapter = write_adapter(tmp_path / "lora", lora, modules_to_save=["norm"])
    out = tmp_path / "out"
    assert main(["merge", "--base", str(base), "--add", f"{adapter}=0.5", "--out", str(out)]) == 0
    assert "lora is an adapter, merged into base" in capsys.readouterr().err
    merged, before = read_model(out), read_model(base)
    weight = before[f"{module}.weight"][1]
    np.testing.assert_allclose(merged[f"{module}.weight"][1], weight + 1.5 * b @ a, rtol=1e-4)
    old = before["model.norm.weight"][1]
    assert same_bits(merged["model.norm.weight"][1], old + (norm - old) * np.float32(0.5))
    assert same_bits(merged[HEAD][1], before[HEAD][1])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "of the kind IA3"),
        ({"init_lora_weights": "pissa"}, "changed its base"),
        ({"r": 3}, "says rank 3"),
    ],
)
def test_other_adapters_are_refused(
    said: dict[str, Any], why: str, tmp_path: Path, capsys: Any
) -> None:
    base = write_model(tmp_path / "base", weights(0))
    pairs = {"lm_head.lora_A.weight": numbers(1, 2, 4), "lm_head.lora_B.weight": numbers(2, 6, 2)}
    adapter = write_adapter(tmp_path / "lora", pairs, **said)
    assert main(["merge", "--base", str(base), "--add", str(adapter), "--out", "out"]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


# Whole or not at all ------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing(three: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        status = main(words(three, tmp_path / "out", "--alpha", "0.5,1"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 1
    assert "Make room, then merge again." in " ".join(capsys.readouterr().err.split())
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_stopped_leaves_nothing(three: dict[str, Path], tmp_path: Path) -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    recipe = Recipe(three["base"], (Vector(three["rl"], three["sft"]),))
    with pytest.raises(KeyboardInterrupt):
        merge(recipe, [tmp_path / "outs" / "out"], report=stop)
    assert list((tmp_path / "outs").iterdir()) == []


def test_what_killed_merges_left_is_cleared_and_what_living_ones_write_is_not(
    three: dict[str, Path], tmp_path: Path
) -> None:
    outs = tmp_path / "outs"
    folders = [outs / f".merging-{name}" / "0" for name in ("dead", "young")]
    for folder in (*folders, outs / ".merging-replacing" / "0-old"):
        folder.mkdir(parents=True)
    for name in ("dead", "replacing"):
        os.utime(outs / f".merging-{name}", (0, 0))
    recipe = Recipe(three["base"], (Vector(three["rl"], three["sft"]),))

    def another(done: int) -> None:
        for folder in outs.iterdir():
            os.utime(folder, (0, 0))
        merge(recipe, [outs / "other"], overwrite=True)

    (outs / "other").mkdir()
    merge(recipe, [outs / "out"], report=another)
    assert {path.name for path in outs.iterdir()} == {"out", "other", ".merging-replacing"}


def test_only_what_was_merged_is_replaced(
    three: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert main(words(three, out)) == 0
    before = (out / "model.safetensors").read_bytes()
    assert main(words(three, out, "--add", f"{three['rl']}=1")) == 2
    assert (out / "model.safetensors").read_bytes() == before
    assert main(words(three, out, "--add", f"{three['rl']}=1", "--overwrite")) == 0
    assert (out / "model.safetensors").read_bytes() != before
    assert main(words(three, three["sft"], "--overwrite")) == 2
    assert "It is not a merged model" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--alpha", "0.5,0.5"], "each once"),
        (["--add", "x=heavy"], "'heavy' is not a number"),
        (["--method", "ties"], "takes models with weights"),
        (["--density", "0.5"], "set --method"),
    ],
)
def test_settings_that_mean_nothing(
    more: list[str], why: str, three: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    assert main(words(three, tmp_path / "out", *more)) == 2
    assert why in " ".join(capsys.readouterr().err.split())

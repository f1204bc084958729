"""`envserver merge`: what is written equals the formula, and models that do not fit are refused."""

import hashlib
import json
import os
import resource
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import yaml
from envserver_factory import Recipe, Vector, merge
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.in_process import Run, Said
from support.models_on_disk import (
    COLUMNS,
    CONFIG,
    EMBEDDING,
    HEAD,
    Stored,
    floats,
    numbers,
    read_model,
    same_bits,
    stored,
    weights,
    write_file,
    write_model,
)

CASES = cases_of(__file__)

NAMES = ("base", "sft", "rl")
NORM, MODULE = "model.norm.weight", "model.layers.0.mlp.up_proj"
THREE = "merge --base base --sft sft --rl rl"


@pytest.fixture
def three(run: Run) -> Callable[..., Said]:
    """Merges three models of the test's folder into its folder `out`."""
    for seed, name in enumerate(NAMES):
        write_model(Path(name), weights(seed))
    return lambda more="", status=0: run(f"{THREE} --out out {more}", status)


def recipe() -> Recipe:
    return Recipe(Path("base"), (Vector(Path("rl"), Path("sft")),))


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


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


def test_two_alphas_in_one_pass(three: Callable[..., Said]) -> None:
    assert three("--alpha 0.5,1.0").out.split() == ["out/alpha-0.5", "out/alpha-1.0"]
    base, sft, rl = (read_model(Path(name)) for name in NAMES)
    for alpha in (0.5, 1.0):
        merged = read_model(Path(f"out/alpha-{alpha}"))
        for name, (dtype, values) in base.items():
            vector = rl[name][1] - sft[name][1]
            assert same_bits(merged[name][1], values + vector * np.float32(alpha))
            assert dtype == merged[name][0]
    assert names_in("out") == {"alpha-0.5", "alpha-1.0"}
    card = Path("out/alpha-0.5/README.md").read_text()
    assert "base + 0.5 * (rl - sft)" in card and str(Path().absolute()) not in card
    for made in json.loads(Path("out/alpha-0.5/merge.json").read_text())["inputs"]:
        for name, digest in made["files"].items():
            assert hashlib.sha256(Path(made["name"], name).read_bytes()).hexdigest() == digest
    for path in Path("base").glob("[!m]*"):  # all but the weights
        assert Path("out/alpha-0.5", path.name).read_bytes() == path.read_bytes()


def test_shards_and_what_is_no_float_stay_as_in_the_base(run: Run) -> None:
    models = [{**weights(seed, "BF16"), "steps": ("I64", np.arange(6))} for seed in range(2)]
    names = list(models[0])
    base = write_model(Path("base"), models[0], shards=[names[:2], names[2:]])
    write_model(Path("other"), models[1])
    run("merge --base base --add other=0.0 --out out")
    for file in base.glob("*.safetensors"):
        assert Path("out", file.name).read_bytes() == file.read_bytes()
    index = "model.safetensors.index.json"
    assert json.loads(Path("out", index).read_text()) == json.loads((base / index).read_text())


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Peak of a merge of three models for two alphas, against the largest of very many tensors."""
    largest = 4 << 20
    tensors = {f"layer.{i}.weight": ("F32", np.zeros((256, 1024), np.float32)) for i in range(24)}
    tensors["embed_tokens.weight"] = ("F32", np.zeros((largest // 1024, 1024), np.float32))
    base = write_model(tmp_path / "base", tensors)
    sft, rl = (shutil.copytree(base, tmp_path / name) for name in ("sft", "rl"))
    whole = sum(values.nbytes for _, values in tensors.values())
    del tensors
    tracemalloc.start()
    merge(Recipe(base, (Vector(rl, sft),), (0.5, 1.0)), [tmp_path / "a", tmp_path / "b"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * largest * 4 < whole


# Models that do not fit ---------------------------------------------------------------------------

WEIGHTS = Path("rl/model.safetensors")


def config(**changes: Any) -> None:
    path = Path("rl/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def tensors(changes: dict[str, Stored | None]) -> None:
    found = read_model(WEIGHTS.parent) | changes
    write_file(WEIGHTS, {name: one for name, one in found.items() if one})


def tokens(**changes: int) -> None:
    path = Path("rl/tokenizer.json")
    said = json.loads(path.read_text())
    said["model"]["vocab"].update(changes)
    path.write_text(json.dumps(said))


HEADS = numbers(1, 6, 4)
WRONG: dict[str, tuple[Callable[[], Any], str, str]] = {
    "shape": (
        lambda: tensors({NORM: ("F32", numbers(1, 5))}),
        "model.norm.weight: [4] and [5]",
        "",
    ),
    "missing": (lambda: tensors({NORM: None}), "rl lacks tensors", "missing_tensors"),
    "untied": (
        lambda: (tensors({HEAD: None}), config(tie_word_embeddings=False)),
        "rl lacks tensors of the base: lm_head.weight",
        "",
    ),
    "tied in name only": (lambda: config(tie_word_embeddings=True), "stores another lm_head", ""),
    "architecture": (lambda: config(model_type="qwen2"), 'model_type: "llama" and "qwen2"', ""),
    "config": (
        lambda: config(rope_theta=1e6),
        "rope_theta: 10000.0 and 1000000.0",
        "config_differences",
    ),
    "quantised": (lambda: config(quantization_config={}), "rl is quantised", ""),
    "vocabulary": (
        lambda: tokens(b=0, c=1),
        "token 'b': 1 in the base, 0 here",
        "tokenizer_differences",
    ),
    "not finite": (
        lambda: tensors({HEAD: ("F32", HEADS * np.inf)}),
        "lm_head.weight has values that are not finite F32",
        "not_finite",
    ),
    "cut off": (
        lambda: WEIGHTS.write_bytes(WEIGHTS.read_bytes()[:-40]),
        "or the file is cut off",
        "",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_models_that_do_not_fit_are_refused_and_some_may_be_allowed(
    case: str, three: Callable[..., Said], run: Run
) -> None:
    change, said, flag = WRONG[case]
    change()
    assert said in run(f"{THREE} --out deep/out --alpha 1", status=2)
    assert not [*Path().glob("deep/**/*.safetensors"), *Path().glob("deep/**/.merging-*")]
    if flag:
        three(f"--allow_{flag}")
        merged, base = read_model(Path("out")), read_model(Path("base"))
        assert set(merged) == set(base)
        assert case != "missing" or same_bits(merged[NORM][1], base[NORM][1])


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_layer_that_is_not_stored_is_the_embedding(tmp_path: Path, tied: bool) -> None:
    base, other = weights(0), weights(1)
    del other[HEAD]
    if tied:
        base[HEAD] = base[EMBEDDING]
    config = {**CONFIG, "tie_word_embeddings": True} if tied else CONFIG
    folders = [
        write_model(tmp_path / name, one, config=config)
        for name, one in (("base", base), ("other", other))
    ]
    weight = 0.3 if tied else 1.0
    merge(Recipe(folders[0], (Vector(folders[1], None, weight),)), [tmp_path / "out"])
    merged = read_model(tmp_path / "out")
    expected = base[HEAD][1] + (other[EMBEDDING][1] - base[HEAD][1]) * np.float32(weight)
    assert same_bits(merged[HEAD][1], merged[EMBEDDING][1] if tied else expected)


# Adapters -----------------------------------------------------------------------------------------


def write_adapter(pairs: dict[str, np.ndarray], **said: Any) -> None:
    """A base, and an adapter beside it."""
    write_model(Path("base"), weights(0))
    folder = Path("lora")
    folder.mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "fan_in_fan_out": False, **said}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    names = {f"base_model.model.{name}": ("F32", values) for name, values in pairs.items()}
    write_file(folder / "adapter_model.safetensors", names)


def test_an_adapter_is_merged_into_the_base(run: Run) -> None:
    a, b, norm = numbers(1, 2, COLUMNS), numbers(2, 5, 2), numbers(3, COLUMNS)
    lora = {f"{MODULE}.lora_A.weight": a, f"{MODULE}.lora_B.weight": b, NORM: norm}
    write_adapter(lora, modules_to_save=["norm"])
    said = run("merge --base base --add lora=0.5 --out out")
    assert "lora is an adapter, merged into base" in said
    merged, before = read_model(Path("out")), read_model(Path("base"))
    weight = before[f"{MODULE}.weight"][1]
    np.testing.assert_allclose(merged[f"{MODULE}.weight"][1], weight + 1.5 * b @ a, rtol=1e-4)
    old = before[NORM][1]
    assert same_bits(merged[NORM][1], old + (norm - old) * np.float32(0.5))
    assert same_bits(merged[HEAD][1], before[HEAD][1])


@pytest.mark.parametrize(("said", "why"), CASES["other_adapters"])
def test_other_adapters_are_refused(said: dict[str, Any], why: str, run: Run) -> None:
    pairs = {"lm_head.lora_A.weight": numbers(1, 2, 4), "lm_head.lora_B.weight": numbers(2, 6, 2)}
    write_adapter(pairs, **said)
    assert why in run("merge --base base --add lora --out out", status=2)


# Whole or not at all ------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing(three: Callable[..., Said]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        said = three("--alpha 0.5,1", status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "Make room, then merge again." in said
    assert names_in("out") == set()


def test_what_killed_merges_left_is_cleared_of_living_ones_not(three: Callable[..., Said]) -> None:
    outs = Path("outs")
    for name in ("dead/0", "young/0", "replacing/0-old"):
        (outs / f".merging-{name}").mkdir(parents=True)
    for name in ("dead", "replacing"):
        os.utime(outs / f".merging-{name}", (0, 0))

    def another(done: int) -> None:
        for folder in outs.iterdir():
            os.utime(folder, (0, 0))
        merge(recipe(), [outs / "other"], overwrite=True)

    (outs / "other").mkdir()
    merge(recipe(), [outs / "out"], report=another)
    assert names_in("outs") == {"out", "other", ".merging-replacing"}


def test_only_what_was_merged_is_replaced(three: Callable[..., Said], run: Run) -> None:
    three()
    written = Path("out/model.safetensors")
    before = written.read_bytes()
    three("--add rl=1", status=2)
    assert written.read_bytes() == before
    three("--add rl=1 --overwrite")
    assert written.read_bytes() != before
    assert "Not a merged model" in run(f"{THREE} --out sft --overwrite", status=2)


# Task vectors in files ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F64"])
def test_a_saved_vector_merges_like_its_models(run: Run, dtype: str) -> None:
    rest = [name for name in weights(0) if name != EMBEDDING]
    for seed, name in enumerate(NAMES):
        write_model(Path(name), weights(seed, dtype), shards=[[EMBEDDING], rest])
    file = "vectors/rl.safetensors"
    run(f"{THREE} --alpha 0.5 --out out --save_vector {file}")
    run(f"merge --base base --add {file} --alpha 0.5 --out again")
    merged, other = (read_model(Path(name, "alpha-0.5")) for name in ("out", "again"))
    assert merged.keys() == other.keys() == weights(0).keys()
    assert all(same_bits(merged[name][1], other[name][1]) for name in merged)
    with safetensors.safe_open(file, "numpy") as vector:
        for name, (_, values) in weights(2, dtype).items():
            difference = floats((dtype, values)) - floats(weights(1, dtype)[name])
            assert same_bits(vector.get_tensor(name), difference)


def test_vectors_that_are_refused(three: Callable[..., Said], run: Run, tmp_path: Path) -> None:
    run("merge --base base --add rl --save_vector v.safetensors")
    before = sorted(tmp_path.rglob("*"))
    for more, why in CASES["wrong_vectors"].items():
        assert why in run(f"merge --base base {more}", status=2)
        assert sorted(tmp_path.rglob("*")) == before


# By mergekit --------------------------------------------------------------------------------------
#
# It is not installed for the tests (it pins old versions of its libraries): what is shown is the
# YAML and the command line that a stand-in is given, and what becomes of its answer. By hand,
# mergekit 0.1.5 merged two tiny models by `ties` as it was told here.

STAND_IN = f"""#!{sys.executable}
import pathlib, shutil, sys
config, folder = map(pathlib.Path, sys.argv[1:])
place = pathlib.Path(__file__).parent.parent
(place / "seen").write_text(config.read_text())
print("merging")
if (place / "fails").exists():
    sys.exit(3)
shutil.copytree(place / "two", folder, dirs_exist_ok=True)
"""


@pytest.fixture
def models(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Three models, and a stand-in that notes what it is given; how a merge of them begins."""
    for name in ("base", "one", "two"):
        write_model(Path(name), {"w": ("F32", np.ones((2, 3), np.float32))})
    program = tmp_path / "bin" / "mergekit-yaml"
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return f"merge --base {tmp_path}/base --out {tmp_path}/out --add {tmp_path}/one"


def test_ties_is_mergekits(models: str, run: Run, tmp_path: Path) -> None:
    more = f"""--add {tmp_path}/two=0.3 --density 0.5 --parameters '{{"normalize": true}}'"""
    run(f"{models}=0.7 {more} --method ties")
    assert yaml.safe_load(Path("seen").read_text()) == {
        "merge_method": "ties",
        "base_model": f"{tmp_path}/base",
        "models": [
            {"model": f"{tmp_path}/{name}", "parameters": {"weight": weight, "density": 0.5}}
            for name, weight in (("one", 0.7), ("two", 0.3))
        ],
        "parameters": {"normalize": True},
    }
    out = Path("out")
    assert "ties of base, one (0.7), two (0.3)" in (out / "README.md").read_text()
    assert all(str(tmp_path) not in path.read_text() for path in out.glob("m*[!s]"))
    told = json.loads((out / "merge.json").read_text())
    assert told["method"] == "ties"
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    assert told["files"] == {"model.safetensors": digest}


def test_slerp_goes_from_the_base_to_another(models: str, run: Run, tmp_path: Path) -> None:
    run(f"{models}=0.4 --method slerp")
    assert yaml.safe_load(Path("seen").read_text()) == {
        "merge_method": "slerp",
        "base_model": f"{tmp_path}/base",
        "models": [{"model": f"{tmp_path}/base"}, {"model": f"{tmp_path}/one"}],
        "parameters": {"t": 0.4},
    }


def test_its_failure_leaves_nothing(models: str, run: Run) -> None:
    Path("fails").touch()
    said = run("merge --base base --out outs/out --add one --method ties", status=1)
    assert "ended with status 3" in said
    assert names_in("outs") == set()

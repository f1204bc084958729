"""Loads the data sets of this environment: the built-in sample, files, the hub."""

from __future__ import annotations

from pathlib import Path

from envserver_environments.rows import DataSets, Hub

SAMPLE = Path(__file__).parent / "data" / "sample.jsonl"

_MATH_CONFIGS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory",
    "prealgebra", "precalculus",
)  # fmt: skip
_MATHQA_ZIP = "zip://{split}.json::https://math-qa.github.io/math-QA/data/MathQA.zip"

HUBS: dict[str, Hub] = {
    "gsm8k": Hub("openai/gsm8k", {"train": "train", "test": "test"}, ("main",)),
    "math": Hub(
        "EleutherAI/hendrycks_math", {"train": "train", "test": "test"}, configs=_MATH_CONFIGS
    ),
    "math500": Hub("HuggingFaceH4/MATH-500", {"test": "test"}),
    "svamp": Hub("ChilleD/SVAMP", {"train": "train", "test": "test"}),
    "mawps": Hub(
        "MU-NLPC/Calc-mawps", {"train": "train", "validation": "validation", "test": "test"}
    ),
    # The hub's own copy is a loading script, which `datasets` no longer runs.
    "mathqa": Hub(
        "json",
        {"train": "train", "validation": "validation", "test": "test"},
        arguments={
            "data_files": {
                "train": _MATHQA_ZIP.format(split="train"),
                "validation": _MATHQA_ZIP.format(split="dev"),
                "test": _MATHQA_ZIP.format(split="test"),
            }
        },
    ),
    "aqua": Hub(
        "deepmind/aqua_rat",
        {"train": "train", "validation": "validation", "test": "test"},
        ("raw",),
    ),
    "aime": Hub("HuggingFaceH4/aime_2024", {"test": "train"}),
    "deepmath": Hub("zwhe99/DeepMath-103K", {"train": "train"}),
    "mathx": Hub("XenArcAI/MathX-5M", {"train": "train"}, streaming=True),
}
DATA = DataSets(SAMPLE, HUBS)

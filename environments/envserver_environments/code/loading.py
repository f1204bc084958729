"""Loads the data sets of this environment: the built-in sample, files, the hub."""

from __future__ import annotations

from pathlib import Path

from envserver_environments.rows import DataSets, Division, Hub

from envserver import Split

SAMPLE = Path(__file__).parent / "data" / "sample.jsonl"

_FROM_TRAIN: dict[Split, str] = {"train": "train", "validation": "train", "test": "train"}

HUBS: dict[str, Hub] = {
    "opc": Hub("OpenCoder-LLM/opc-sft-stage2", _FROM_TRAIN, ("educational_instruct",)),
    "mbpp": Hub(
        "google-research-datasets/mbpp",
        {"train": "train", "validation": "validation", "test": "test"},
        ("full",),
    ),
    "mbpp_plus": Hub("evalplus/mbppplus", {"test": "test"}),
    "humaneval": Hub("openai/openai_humaneval", {"test": "test"}),
    "humaneval_plus": Hub("evalplus/humanevalplus", {"test": "test"}),
}
DATA = DataSets(SAMPLE, HUBS, {"opc": Division()})

"""The commands of this package, for the entry point group `envserver.commands`."""

from __future__ import annotations

from typing import Any

from envserver.cli import Command


def _command(module: str, name: str, summary: str, **facts: Any) -> Command:
    """Returns a command: `run_NAME` and the specification `NAME` of a module here."""
    return Command(f"{__name__}.{module}", summary, f"run_{name}", name.upper(), **facts)


def _data_set(name: str, summary: str, generate: str) -> Command:
    words = {"generate": _command("sft", f"generate_{name}", generate)}
    return _command("sft", name, summary, words=words)


_SFT = {
    "build": _command("sft", "build", "make rows for each tool from unified trajectories"),
    "preview": _command("sft", "preview", "show what `sft build` would write"),
    "router": _data_set(
        "router", "prepare queries and plans", "let a teacher write plans for queries"
    ),
    "math": _data_set(
        "math", "prepare problems with solutions", "keep a teacher's correct solutions of k tries"
    ),
    "code": _data_set(
        "code", "prepare programs", "keep a teacher's programs that pass their tests"
    ),
}

COMMANDS = {
    "init": _command("environments", "init", "make the package of a new environment"),
    "lm-eval": _command("environments", "lm_eval", "run tasks of lm-evaluation-harness on a model"),
    "sft-gen": _command(
        "environments",
        "sft_gen",
        "write the best rollouts as rows for supervised training",
        has_environment=True,
    ),
    "export": _command(
        "export", "export", "filter stored rollouts and write them in another format"
    ),
    "scenarios": _command("environments", "scenarios", "run models in a scenario, keep traces"),
    "convert": _command("export", "convert", "make unified trajectories from other formats"),
    "validate": _command("export", "validate", "check files of unified trajectories"),
    "sft": Command("", "build data for supervised fine-tuning", words=_SFT),
    "merge": _command("merge", "merge", "merge models: base + alpha * (rl - sft)"),
    "sweep": _command(
        "merge",
        "sweep",
        "merge with several alphas, evaluate each, draw the reward",
        has_environment=True,
    ),
    "publish": _command("merge", "publish", "publish a model or an adapter on the hub"),
}

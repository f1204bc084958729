"""The commands of this package, for the entry point group `envserver.commands`."""

from __future__ import annotations

from envserver.cli import Command

_SFT = {
    "build": Command(
        f"{__name__}.sft", "make rows for each tool from unified trajectories", "run_build", "BUILD"
    ),
    "preview": Command(
        f"{__name__}.sft", "show what `sft build` would write", "run_preview", "PREVIEW"
    ),
    "router": Command(
        f"{__name__}.sft",
        "prepare queries and plans",
        "run_router",
        "ROUTER",
        words={
            "generate": Command(
                f"{__name__}.sft_generate",
                "let a teacher write plans for queries",
                "run_router",
                "ROUTER",
            )
        },
    ),
    "math": Command(
        f"{__name__}.sft",
        "prepare problems with solutions",
        "run_math",
        "MATH",
        words={
            "generate": Command(
                f"{__name__}.sft_generate",
                "keep a teacher's right solutions of k tries",
                "run_math",
                "MATH",
            )
        },
    ),
    "code": Command(
        f"{__name__}.sft",
        "prepare programs",
        "run_code",
        "CODE",
        words={
            "generate": Command(
                f"{__name__}.sft_generate",
                "keep a teacher's programs that pass their tests",
                "run_code",
                "CODE",
            )
        },
    ),
}

COMMANDS = {
    "init": Command(f"{__name__}.init", "make the package of a new environment", before="sample"),
    "lm-eval": Command(
        f"{__name__}.lm_eval", "run tasks of lm-evaluation-harness on a model", before="serve"
    ),
    "sft-gen": Command(
        f"{__name__}.sft_gen",
        "write the best rollouts as rows for supervised training",
        has_environment=True,
        before="top",
    ),
    "export": Command(
        f"{__name__}.export",
        "filter stored rollouts and write them in another format",
        before="verify",
    ),
    "scenarios": Command(
        f"{__name__}.scenarios", "run models in a scenario, keep traces", before="check"
    ),
    "convert": Command(
        f"{__name__}.trajectories",
        "make unified trajectories from other formats",
        "run_convert",
        "CONVERT",
        before="check",
    ),
    "validate": Command(
        f"{__name__}.trajectories",
        "check files of unified trajectories",
        "run_validate",
        "VALIDATE",
        before="check",
    ),
    "sft": Command("", "build data for supervised fine-tuning", words=_SFT, before="check"),
    "merge": Command(
        f"{__name__}.merge", "merge models: base + alpha * (rl - sft)", before="check"
    ),
    "sweep": Command(
        f"{__name__}.merge",
        "merge with several alphas, evaluate each, draw the reward",
        "run_sweep",
        "SWEEP",
        has_environment=True,
        before="check",
    ),
    "publish": Command(
        f"{__name__}.merge",
        "publish a model or an adapter on the hub",
        "run_publish",
        "PUBLISH",
        before="check",
    ),
}

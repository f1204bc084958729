"""Starts vLLM with the modules of `vllm_worker`, which reload or receive weights. vLLM itself is
not imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "vllm_worker"
"""Holds these modules only, since modules in a path hide others of the same name."""
ARGUMENTS: Final = ("--worker-extension-cls", "envserver_reload.ReloadWeights")
GLOO_ARGUMENTS: Final = ("--weight-transfer-config", '{"backend": "envserver_gloo"}')
"""For weights that a trainer sends to engines on CPUs, by the plugin in the same folder."""


def extended(environ: Mapping[str, str]) -> dict[str, str]:
    """For a vLLM started with ARGUMENTS: the routes that change weights, pause and load adapters
    are on, and the extension can be imported."""
    path = [str(FOLDER), environ.get("PYTHONPATH", "")]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }

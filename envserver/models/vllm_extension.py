"""How vLLM is started so that it takes new weights: `vllm_worker/envserver_reload.py` in its path.

In flows the environment that vLLM is to be started with, out flows one in which it finds our
extension of its worker. Nothing of vLLM is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "vllm_worker"
"""Holds that one module and nothing else: what stands in a path hides what has the same name."""
ARGUMENTS: Final = ("--worker-extension-cls", "envserver_reload.ReloadWeights")
METHOD: Final = "envserver_reload"
"""What `/collective_rpc` is asked for; it takes `weights_path`."""


def extended(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a vLLM that is started with ARGUMENTS: the routes that change weights, pause
    and load adapters are on, and the extension can be imported.
    """
    path = [str(FOLDER), environ.get("PYTHONPATH", "")]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }

"""Lets a vLLM worker load new weights from a folder, tied ones included.

In: the path of a folder with safetensors, over `/collective_rpc`. Out: an engine whose every layer
uses them. vLLM's own `reload_weights` misses one case on a CPU: an embedding that is also the
output layer was packed for its matrix product when it was loaded, and the packed copy stays old. It
is packed again here.

This file is alone in its folder, for a Python that has vLLM but not this package:

    PYTHONPATH=.../envserver/models/vllm_worker vllm serve ... \\
        --worker-extension-cls envserver_reload.ReloadWeights
"""

from __future__ import annotations

from typing import Any


class ReloadWeights:
    """Becomes a base of vLLM's worker class, so that `self` is the worker."""

    def envserver_can_reload(self) -> bool:
        return True

    def envserver_reload(self, weights_path: str) -> dict[str, Any]:
        """Loads the weights in the folder; returns how many layers had to be packed again."""
        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        return {"packed": pack_again(worker.model_runner.get_model())}


def pack_again(model: Any) -> int:
    """Packs output layers anew that are also an embedding; returns their number."""
    from vllm.model_executor.layers.utils import (  # type: ignore[import-not-found]
        dispatch_cpu_unquantized_gemm,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found]
        VocabParallelEmbedding,
    )

    packed = 0
    for module in model.modules():
        # vLLM packs it only on a CPU and if its weights are not quantised.
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            packed += 1
    return packed

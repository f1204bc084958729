"""Receives weights from a trainer over gloo: a backend of vLLM's weight-transfer API for CPUs.

In: what the trainer sends to the routes `/init_weight_transfer_engine` and `/update_weights`, and
a broadcast of each bucket. Out: a model with these weights. What always holds: a bucket whose
checksum differs is not loaded, and a trainer that is gone ends the wait after `timeout_seconds`.

A Python that has vLLM but not this package finds it as a plugin, by the entry point beside it:

    PYTHONPATH=.../envserver/models/vllm_worker vllm serve ... \\
        --weight-transfer-config '{"backend": "envserver_gloo"}'

The local engine receives with the same two functions, so vLLM is imported by `register` only.
"""

from __future__ import annotations

import hashlib
import math
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

BACKEND: Final = "envserver_gloo"
ALIGNMENT: Final = 16
"""Each tensor of a bucket begins at a multiple of so many bytes."""


@dataclass
class JoinInfo:
    """Where the trainer (rank 0) waits for the ranks of this engine, `rank_offset` and above."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_seconds: float


@dataclass
class BucketInfo:
    """The tensors of one broadcast, in order, and the SHA-256 of all its bytes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    sha256: str


def join(info: JoinInfo, rank: int) -> Any:
    """Joins the trainer's group as the engine's rank `rank`."""
    limit = timedelta(seconds=info.timeout_seconds)
    address, port = info.master_address, info.master_port
    store = dist.TCPStore(address, port, info.world_size, is_master=False, timeout=limit)
    # gloo listens at the address that reaches the trainer, not at the one of the host's name.
    with socket.create_connection((address, port), info.timeout_seconds) as probe:
        here = probe.getsockname()[0]
    options: Any = dist.ProcessGroupGloo._Options()
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
    return dist.ProcessGroupGloo(store, info.rank_offset + rank, info.world_size, options)


def receive(group: Any, info: BucketInfo) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of the next broadcast by name; they share the memory of the bucket."""
    dtypes = [getattr(torch, name) for name in info.dtype_names]
    counts = map(math.prod, info.shapes)
    sizes = [count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True)]
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    payload = torch.empty(sum(padded), dtype=torch.uint8)
    group.broadcast(payload, 0).wait()
    if (found := hashlib.sha256(payload.numpy()).hexdigest()) != info.sha256:
        raise ValueError(f"The bucket with {info.names[0]} has the SHA-256 {found}: not loaded.")
    parts = zip(info.names, payload.split(padded), sizes, dtypes, info.shapes, strict=True)
    return [(name, part[:size].view(dtype).view(shape)) for name, part, size, dtype, shape in parts]


def register() -> None:
    """Adds the backend to vLLM, which calls this in each of its processes."""
    from envserver_reload import pack_again  # type: ignore[import-not-found]
    from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
        WeightTransferEngine,
    )
    from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found]
        WeightTransferEngineFactory,
    )
    from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    class GlooEngine(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = JoinInfo, BucketInfo
        group: Any = None

        def init_transfer_engine(self, init_info: JoinInfo) -> None:
            config = self.parallel_config
            rank = config.data_parallel_index * config.world_size + config.rank
            self.group = None  # of the trainer before
            self.group = join(init_info, rank)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: BucketInfo) -> None:
            try:
                self.model.load_weights(receive(self.group, update_info))
            except BaseException:
                self.shutdown()  # the trainer must not wait for us
                raise

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            pack_again(self.model)

        def shutdown(self) -> None:
            self.group = None

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooEngine)

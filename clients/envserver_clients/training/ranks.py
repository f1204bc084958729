"""The processes that train one model together, started by torchrun; one process alone by default.

Invariants: rank 0 decides what happens next (`together`), and the others do the same work at the
same time (`follow`); so the trainer's loop runs on rank 0 only, and reads the same for one process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor

from .settings import end_with_parent

_WAIT: Final = timedelta(days=7)
"""The others wait so long for rank 0, which waits for batches. A rank that died is noticed at once:
its connections close."""

Handler = Callable[..., object]


class Ranks:
    """This process (`rank`; 0 leads) among the `size` that train the model; with 1 nothing is sent.

    `divided`: the weights are divided, also if there is one process. Default: if there are more.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, device: str = "cpu", *, divided: bool | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.divided = size > 1 if divided is None else divided
        self._lock = threading.RLock()
        self._inside = self._failed = False
        # Objects, numbers and checkpoints travel on the CPU, whatever the gradients do.
        self.group = dist.new_group(backend="gloo", timeout=_WAIT) if self.divided else None

    @classmethod
    @contextmanager
    def joined(cls, device: str = "cpu") -> Iterator[Self]:
        """Joins the other processes of torchrun, if there are any. `cuda` becomes the rank's own
        GPU."""
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if "RANK" not in os.environ:
            yield cls(device=device)
            return
        end_with_parent()
        on_gpu = device.startswith("cuda")
        if on_gpu:
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        # torchrun's store outlives a restart of the ranks, with the addresses of those that died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", next(dist.rendezvous("env://"))[0])
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        ranks = cls(rank, size, device, divided=True)
        try:
            yield ranks
        finally:
            ranks._end()
        dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0: it leases batches, writes files and talks to others."""
        return self.rank == 0

    @contextmanager
    def together(self, name: str, *arguments: object) -> Iterator[None]:
        """Lets the others call their handler `name` with `arguments` while the block runs.

        May be called by any thread of rank 0: blocks run one after the other. Within a block the
        others do the same already, so another block only runs; as on other ranks, and in a process
        alone.
        """
        if not self.leads or self.size == 1:
            yield
            return
        with self._lock:
            if self._inside:
                yield
                return
            if self._failed:
                raise RuntimeError(f"The ranks cannot {name}: earlier work failed on rank 0 alone.")
            self._inside = True
            self.broadcast((name, arguments))
            try:
                yield
            except GeneratorExit:  # an iterator over all weights was closed, which has ended it
                raise
            except BaseException:
                self._failed = True  # the others are still in the middle
                raise
            finally:
                self._inside = False

    def follow(self, handlers: Mapping[str, Handler]) -> None:
        """Does what rank 0 does, until it ends."""
        while (call := self.broadcast(None)) is not None:
            name, arguments = call
            handlers[name](*arguments)

    def _end(self) -> None:
        """Ends the others' `follow`, unless they are in the middle of something that failed."""
        if self.leads and not self._failed:
            with suppress(RuntimeError):  # torchrun has ended them already
                self.broadcast(None)

    def broadcast(self, value: Any) -> Any:
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.group)
        return held[0]

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sums over all ranks; of names that end in `_max` the largest value."""
        found = dict(values)
        if self.size > 1:
            for names, how in (
                ([name for name in values if not name.endswith("_max")], dist.ReduceOp.SUM),
                ([name for name in values if name.endswith("_max")], dist.ReduceOp.MAX),
            ):
                held = torch.tensor([values[name] for name in names], dtype=torch.float64)
                dist.all_reduce(held, how, group=self.group)
                found.update(zip(names, held.tolist(), strict=True))
        return found


def shard(model: Any, ranks: Ranks, dtype: torch.dtype) -> None:
    """Divides a model's parameters among the ranks (FSDP2), layer by layer, if they are `divided`.

    `dtype`: of computing; parameters keep theirs, and gradients are added up in float32.
    """
    if not ranks.divided:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    is_half = dtype is not torch.float32
    types = MixedPrecisionPolicy(dtype if is_half else None, torch.float32)
    # Without the last layers' default of False, a forward pass without a backward pass would leave
    # whole parameters behind.
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=types, reshard_after_forward=True)


def whole(value: Tensor) -> Tensor:
    """A parameter as one tensor. All ranks must call this at the same time."""
    full = getattr(value, "full_tensor", None)
    found: Tensor = value if full is None else full()
    return found


def own_part(value: Tensor) -> Tensor:
    """Returns this rank's part of a parameter."""
    local = getattr(value, "to_local", None)
    found: Tensor = value if local is None else local()
    return found


def placed_like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value` divided among the ranks as `parameter` is, if that is divided."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not value.ndim:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

"""Sends a model's tensors to one engine, in buckets of bounded size.

In: names and tensors, and an engine's control. Out: an engine that received them, or an
`EngineError`. What always holds: the tensors are walked exactly once, so that the ranks of a
sharded model stay in step; a bucket keeps its bytes, so that an engine that restarts gets the
published weights; each engine has a group of its own, so that one that ends disturbs no other.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol
from urllib.parse import urlsplit

from envserver_records import EngineError, EngineUnavailable, InputError

from .engines import EngineControl

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors = Iterable[tuple[str, "Tensor"]]
Wire = Literal["gloo", "nccl"]
ALIGNMENT: Final = 16
"""Each tensor of a bucket begins at a multiple of so many bytes (as engines expect)."""
_LOOK_SECONDS: Final = 0.0005


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together.

    Args:
        payload: uint8[N]: the tensors' bytes, each padded to a multiple of ALIGNMENT.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    payload: Tensor
    sha256: str

    @property
    def about(self) -> dict[str, Any]:
        """Names, dtypes and shapes, by which an engine unpacks it."""
        return {"names": self.names, "dtype_names": self.dtype_names, "shapes": self.shapes}

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors, which share the bucket's memory."""
        import torch

        offset = 0
        for dtype_name, shape in zip(self.dtype_names, self.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            yield self.payload[offset : offset + size].view(dtype).view(shape)
            offset += _padded(size)


def packed(tensors: NamedTensors, most_bytes: int) -> list[Bucket]:
    """Returns the tensors in buckets of at most `most_bytes`; a larger tensor has its own.
    Raises InputError: there is none.
    """
    buckets: list[Bucket] = []
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        more = _padded(tensor.numel() * tensor.element_size())
        if waiting and size + more > most_bytes:
            buckets.append(_bucket(waiting, size))
            waiting, size = [], 0
        waiting.append((name, tensor.detach()))
        size += more
    if not waiting:
        raise InputError("There are no weights to send.")
    return [*buckets, _bucket(waiting, size)]


def _bucket(named: list[tuple[str, Tensor]], size: int) -> Bucket:
    import torch

    payload = torch.zeros(size, dtype=torch.uint8)
    offset = 0
    for _, tensor in named:
        taken = tensor.numel() * tensor.element_size()
        if taken:
            here = payload[offset : offset + taken].view(tensor.dtype)
            here.copy_(tensor.reshape(-1))
        offset += _padded(taken)
    return Bucket(
        [name for name, _ in named],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        [list(tensor.shape) for _, tensor in named],
        payload,
        hashlib.sha256(payload.numpy()).hexdigest(),
    )


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Link(Protocol):
    """A connection to all ranks of one engine."""

    def send(self, bucket: Bucket) -> None:
        """Sends a bucket while the engine's update is open.

        Raises:
            EngineError: it did not take it; the connection is not usable any more.
        """


def connect(engine: EngineControl, wire: Wire, seconds: float, address: str = "") -> Link:
    """Connects to an engine; one that was connected to another trainer leaves that.

    Args:
        seconds: the longest wait for one bucket.
        address: this machine's, as the engine sees it. Default: the one that reaches the engine.

    Raises:
        EngineError: it was not started for this, or does not answer.
    """
    here = address or _address_towards(engine.url)
    world = 1 + engine.world_size()
    return (_Gloo if wire == "gloo" else _Nccl)(engine, here, world, seconds)


class _Gloo:
    """Over TCP, from the CPU; the engine has the backend `envserver_gloo`, or is the local one."""

    def __init__(self, engine: EngineControl, address: str, world: int, seconds: float) -> None:
        from torch.distributed import ProcessGroupGloo, TCPStore

        self._engine = engine
        limit = timedelta(seconds=seconds)
        options: Any = ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        store = TCPStore(address, 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        about = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world,
            "timeout_seconds": seconds,
        }
        self._group: Any = _both(engine, about, lambda: ProcessGroupGloo(store, 0, world, options))

    def send(self, bucket: Bucket) -> None:
        """See `Link`."""
        about = {**bucket.about, "sha256": bucket.sha256}
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(self._engine.update_weights, about)
            work = self._group.broadcast(bucket.payload, 0)
            # An engine that refuses never receives: its answer comes before the end of the wait.
            while not work.is_completed() and not _has_failed(taken):
                time.sleep(_LOOK_SECONDS)
            taken.result()
            _finished(work.wait)


class _Nccl:
    """Between GPUs; vLLM is installed here too, and the engine has the backend `nccl`.

    Written by vLLM's API, and not tried: the project's machines have no two GPUs.
    """

    def __init__(self, engine: EngineControl, address: str, world: int, seconds: float) -> None:
        from vllm.distributed.weight_transfer.nccl_common import (  # type: ignore[import-not-found]
            trainer_init,
        )

        self._engine = engine
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        about = {"master_address": address, "master_port": port, "world_size": world}
        self._group: Any = _both(engine, {**about, "rank_offset": 1}, lambda: trainer_init(about))

    def send(self, bucket: Bucket) -> None:
        """See `Link`."""
        import torch

        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(self._engine.update_weights, bucket.about)
            stream = torch.cuda.current_stream()
            for tensor in bucket.tensors():
                if _has_failed(taken):
                    break
                self._group.broadcast(tensor.to("cuda"), src=0, stream=stream)
            taken.result()
            stream.synchronize()


def _both(engine: EngineControl, about: dict[str, Any], join: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(engine.init_weight_transfer, about)
        # The engine's refusal comes at once, and the group's constructor would wait for it in vain.
        mine = _alone(join)
        while not mine.done() and not _has_failed(joined):
            time.sleep(_LOOK_SECONDS)
        joined.result()
        return _finished(mine.result)


def _alone(call: Any) -> Future[Any]:
    """Runs `call` in a thread; its result may be ignored."""
    pool = ThreadPoolExecutor(1)
    running = pool.submit(call)
    pool.shutdown(wait=False)
    return running


def _has_failed(running: Future[Any]) -> bool:
    return running.done() and running.exception() is not None


def _finished(wait: Any) -> Any:
    try:
        return wait()
    except EngineError:
        raise
    except RuntimeError as error:  # what torch raises for its connections
        raise EngineUnavailable(f"The connection to it broke: {error}.") from error


def _address_towards(url: str) -> str:
    """Returns the address of this machine from which `url` is reached."""
    parts = urlsplit(url)
    try:
        with socket.create_connection(
            (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), 10
        ) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineUnavailable(f"It does not answer: {error!r}.") from error

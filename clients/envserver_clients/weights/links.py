"""The trainer's end of the connection to one engine, by which it sends buckets.

In: an engine's control and buckets. Out: an engine that received them, or an `EngineError`. Each
engine has a group of its own, so that one that ends does not disturb the others.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, Literal, Protocol
from urllib.parse import urlsplit

from envserver_records import EngineError, EngineUnavailable

from .buckets import Bucket
from .engines import EngineControl

Wire = Literal["gloo", "nccl"]
_LOOK_SECONDS: Final = 0.0005


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
    """Joins a group while the engine does; returns the group."""
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(engine.init_weight_transfer, about)
        # The engine's refusal comes at once, and the group's constructor would wait for it in vain.
        mine = _alone(join)
        while not mine.done() and not _has_failed(joined):
            time.sleep(_LOOK_SECONDS)
        joined.result()
        return _finished(mine.result)


def _alone(call: Any) -> Future[Any]:
    """Runs `call` in a thread that nobody waits for if it is not needed any more."""
    pool = ThreadPoolExecutor(1)
    running = pool.submit(call)
    pool.shutdown(wait=False)
    return running


def _has_failed(running: Future[Any]) -> bool:
    return running.done() and running.exception() is not None


def _finished(wait: Any) -> Any:
    """Returns what `wait` returns."""
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

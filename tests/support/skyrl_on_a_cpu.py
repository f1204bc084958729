"""SkyRL 0.3.0 on a machine without a GPU: `python skyrl_on_a_cpu.py SETTINGS...`.

What is SkyRL's: its entry point, configuration, data set, trainer, advantages, Ray actor groups,
policy worker with FSDP2, loss, optimizer, and inference client over the engine's HTTP routes. What
stands in: the worker's device is the CPU with gloo and float32, and weights travel as files in
WEIGHTS_FOLDER that a vLLM for CPU loads by `/collective_rpc` (its own senders need NCCL or CUDA
IPC; the receiving half is a worker extension for vLLM 0.23 on GPUs).
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils  # noqa: F401 (it looks for flash-attn: before the stand-in)
from envserver_clients.adapters import skyrl_training  # its first import must be this one
from envserver_clients.weights.engines import EngineControl, Timeouts

# SkyRL's model imports two functions of flash-attn, for GPUs; it calls them only to remove padding.
_padding: Any = types.ModuleType("flash_attn.bert_padding")
_padding.pad_input = _padding.unpad_input = None
sys.modules |= {"flash_attn": types.ModuleType("flash_attn"), "flash_attn.bert_padding": _padding}

from skyrl.backends.skyrl_train import weight_sync  # noqa: E402 # isort: skip
from skyrl.backends.skyrl_train.inference_servers import remote_inference_client  # noqa: E402 # isort: skip
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker  # noqa: E402 # isort: skip

for _name in ("flash_attn", "flash_attn.bert_padding"):
    del sys.modules[_name]


@dataclass
class FilesInfo(weight_sync.WeightSyncInitInfo):  # type: ignore[misc, unused-ignore]
    override_existing_receiver: bool = True


class FilesSender(weight_sync.WeightTransferSender):  # type: ignore[misc, unused-ignore]
    """Writes the weights and has the engines load them."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls

    async def send_chunks(self, chunks: Iterable[Any], weight_metadata: Any = None) -> None:
        from safetensors.torch import save_file

        folder = Path(os.environ["WEIGHTS_FOLDER"])
        folder.mkdir(exist_ok=True)
        tensors = {
            name: tensor.detach().contiguous().clone()
            for chunk in chunks
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
        }
        save_file(tensors, folder / "model.safetensors")
        for url in self._urls:
            EngineControl(url, Timeouts()).reload("envserver_reload", folder)

    def teardown(self) -> None: ...


class FilesStrategy(weight_sync.WeightTransferStrategy):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def create_init_info(ie_cfg: Any, inference_world_size: int | None = None) -> FilesInfo:
        return FilesInfo()

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        raise NotImplementedError

    @staticmethod
    def create_sender(init_info: Any, inference_client: Any) -> FilesSender:
        return FilesSender(inference_client.server_urls)


def compute_on_the_cpu() -> None:
    """Makes torch.cuda's functions that SkyRL's worker calls mean the CPU."""
    cpu = torch.device("cpu")
    group, mesh, autocast = (
        torch.distributed.init_process_group,
        torch.distributed.device_mesh.init_device_mesh,
        torch.autocast,
    )
    nothing: Any = lambda *_, **__: None  # noqa: E731
    for name in ("empty_cache", "synchronize", "set_device", "manual_seed_all"):
        setattr(torch.cuda, name, nothing)
    torch.cuda.current_device = lambda: cpu
    torch.cuda.device_count = lambda: 1
    torch.cuda.mem_get_info = lambda *_: (0, 0)
    torch.distributed.init_process_group = lambda backend, **settings: group("gloo", **settings)
    on_the_cpu: Any = lambda _, **settings: mesh("cpu", **settings)  # noqa: E731
    torch.distributed.device_mesh.init_device_mesh = on_the_cpu
    from skyrl.backends.skyrl_train.distributed import fsdp_utils

    fsdp_utils.init_device_mesh = on_the_cpu
    # It sends buffers to other ranks by way of "cuda"; there is one rank.
    fsdp_utils._sync_non_persistent_buffers = nothing
    torch.autocast = lambda **_: autocast("cpu", enabled=False)


class CpuPolicyWorker(fsdp_worker.FSDPPolicyWorkerBase):  # type: ignore[misc, unused-ignore]
    """SkyRL's policy worker."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        compute_on_the_cpu()
        weight_sync.get_transfer_strategy_cls = lambda **_: FilesStrategy
        # Files need no group of processes, which this would make with the engines.
        remote_inference_client.RemoteInferenceClient.init_weight_update_communicator = _nothing
        super().__init__(*args, **settings)

    def _set_numa_affinity(self, rank: int) -> None: ...


def run(config: Any, url: str) -> None:
    import ray

    # The Rust router that SkyRL puts before several engines of its own; there is one here.
    router: Any = types.ModuleType("vllm_router.launch_router")
    router.launch_router = router.RouterArgs = None
    for name in ("vllm_router", "vllm_router.launch_router", "vllm_router.router_args"):
        sys.modules[name] = router
    fsdp_worker.PolicyWorker = ray.remote(num_gpus=1)(CpuPolicyWorker)
    skyrl_training.experiment(url)(config).run()


async def _nothing(*_: Any) -> dict[str, Any]:
    return {}


if __name__ == "__main__":
    import support.skyrl_on_a_cpu as this  # Ray's workers import it by this name

    os.environ[skyrl_training.URL_VARIABLE] = os.environ["SERVER_URL"]
    with contextlib.suppress(KeyboardInterrupt):
        skyrl_training._run = lambda config, url, token: this.run(config, url)
        skyrl_training.main()

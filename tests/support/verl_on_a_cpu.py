"""Adds by verl's plug-ins what verl 0.9.1 lacks on a machine without a GPU.

`VERL_USE_EXTERNAL_MODULES=support.verl_on_a_cpu` makes every process of verl import this.

- A platform, so that its FSDP workers compute on the CPU with gloo.
- A rollout backend `vllm_cpu` in place of its vLLM on GPUs, which it starts itself and which gets
  weights by CUDA IPC: here the replica is a vLLM for CPU that already runs at ENGINE_URL, and loads
  the weights from files in WEIGHTS_FOLDER by its `/collective_rpc`.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from envserver_clients.weights.engines import EngineControl, Timeouts
from verl.models.transformers import monkey_patch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry


class _Device(types.ModuleType):
    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self) -> str:
        return "CPU"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc, unused-ignore]
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("cpu")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # Ray counts it; nobody looks for one.

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def cudart(self) -> Any:
        return None


# verl patches a class of TRL's wherever TRL is installed, and TRL 1.16 no longer has it.
monkey_patch.is_trl_available = lambda: False
_init_process_group = torch.distributed.init_process_group


def _with_gloo(backend: str | None = None, **settings: Any) -> None:
    """verl asks for "cpu:gloo,DEVICE:BACKEND", which torch refuses where the device is the CPU."""
    _init_process_group("gloo" if backend and "gloo" in backend else backend, **settings)


torch.distributed.init_process_group = _with_gloo


def _engine() -> EngineControl:
    return EngineControl(os.environ["ENGINE_URL"], Timeouts())


class FilesToVllm(base.BaseRollout):  # type: ignore[misc, unused-ignore]
    """Gives verl's weights to the running vLLM."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, **_: Any) -> None:
        from safetensors.torch import save_file

        folder = Path(os.environ["WEIGHTS_FOLDER"])
        folder.mkdir(exist_ok=True)
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in weights}
        save_file(tensors, folder / "model.safetensors")
        engine = _engine()
        engine.pause("wait")
        engine.reload("envserver_reload", folder)
        engine.reset_prefix_cache(of_kept_calls=False)
        engine.resume()


class RunningVllm(RolloutReplica):  # type: ignore[misc, unused-ignore]
    """verl's replica; its server runs already."""

    async def launch_servers(self) -> None:
        self._server_address = os.environ["ENGINE_URL"].removeprefix("http://")
        self._server_handle = "nobody"  # verl's own agent loops would call it

    async def sleep(self) -> None:
        _engine().pause("wait")

    async def wake_up(self) -> None:
        _engine().resume()


base._ROLLOUT_REGISTRY["vllm_cpu", "async"] = f"{__name__}.FilesToVllm"
RolloutReplicaRegistry.register("vllm_cpu", lambda: RunningVllm)

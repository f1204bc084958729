"""verl with its own engines behind a server: `python -m envserver_clients.adapters.verl_training`.

In: verl's settings, and `envserver.url`. Out: verl's own training; its agent loops order rollouts
from the server (`adapters/verl.py`), whose agents ask verl's rollout engines. The hooks are those
of verl's `CheckpointEngineManager`, which it calls around every change of weights:

    sleep_replicas, abort_replicas   the server's calls pause
    update_weights(global_steps)     pause; verl's own; register its engines; the calls go on

The server's policy version is verl's global step. Engines that sleep while verl trains get no call.
`configs/verl/math.yaml` is an example. Run with verl 0.9.1.
"""

from __future__ import annotations

from typing import Any

from .trainers_engines import TrainersEngines


def checkpoint_manager(engines: TrainersEngines) -> type[Any]:
    """verl's `CheckpointEngineManager`, which also tells `engines`' server."""
    from verl.checkpoint_engine import (  # type: ignore[import-not-found, unused-ignore]
        CheckpointEngineManager,
    )
    from verl.utils.ray_utils import auto_await  # type: ignore[import-not-found, unused-ignore]

    class EnvserverCheckpoints(CheckpointEngineManager):  # type: ignore[misc, unused-ignore]
        @auto_await  # type: ignore[untyped-decorator, unused-ignore]
        async def sleep_replicas(self) -> None:
            await engines.pause()
            await CheckpointEngineManager.sleep_replicas(self)

        @auto_await  # type: ignore[untyped-decorator, unused-ignore]
        async def abort_replicas(self, reject_request: bool = False) -> None:
            await engines.pause()
            await CheckpointEngineManager.abort_replicas(self, reject_request)

        @auto_await  # type: ignore[untyped-decorator, unused-ignore]
        async def update_weights(self, global_steps: int | None = None) -> Any:
            await engines.pause()
            result = await CheckpointEngineManager.update_weights(self, global_steps)
            addresses = [replica.server_address for replica in self.replicas]
            await engines.publish(addresses, global_steps)
            return result

    return EnvserverCheckpoints


def use_server(engines: TrainersEngines) -> None:
    """Makes the trainers that are created from now on in this process tell the server."""
    from verl.trainer.ppo.v1 import (  # type: ignore[import-not-found, unused-ignore]
        trainer_base,
        trainer_separate_async,
    )

    manager = checkpoint_manager(engines)
    for module in (trainer_base, trainer_separate_async):
        module.CheckpointEngineManager = manager


def task_runner() -> Any:
    """Returns verl's task runner (a Ray actor class) for `run_ppo`, which uses `envserver.url`."""
    import ray  # type: ignore[import-not-found, unused-ignore]
    from verl.trainer.main_ppo import (  # type: ignore[import-not-found, unused-ignore]
        TaskRunnerV1,
    )

    theirs = TaskRunnerV1.__ray_metadata__.modified_class

    class EnvserverTaskRunner(theirs):  # type: ignore[misc, valid-type, unused-ignore]
        def run(self, config: Any) -> None:
            use_server(TrainersEngines(**config.envserver))
            super().run(config)

    return ray.remote(EnvserverTaskRunner)


def main() -> None:
    """Trains as verl's `main_ppo` does, with its settings and `envserver`'s."""
    import hydra  # type: ignore[import-not-found, unused-ignore]
    from verl.trainer import main_ppo  # type: ignore[import-not-found, unused-ignore]

    def train(config: Any) -> None:
        main_ppo.auto_set_device(config)
        main_ppo.validate_config(
            config=config,
            use_reference_policy=main_ppo.need_reference_policy(config),
            use_critic=main_ppo.need_critic(config),
        )
        main_ppo.run_ppo(config, task_runner_class=task_runner())

    theirs = {"config_path": "pkg://verl.trainer.config", "config_name": "ppo_trainer"}
    hydra.main(version_base=None, **theirs)(train)()


if __name__ == "__main__":
    main()

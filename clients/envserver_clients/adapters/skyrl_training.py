"""SkyRL with its own engines behind a server: `python -m
envserver_clients.adapters.skyrl_training`.

In: SkyRL's settings, and ENVSERVER_URL. Out: SkyRL's own training; its generator orders rollouts
from the server (`adapters/skyrl.py`), whose agents ask SkyRL's inference engines. The hooks are
those of its inference client, which its trainer calls around every change of weights:

    pause_generation, sleep      the server's calls pause; SkyRL's own
    increment_weight_version     register its engines with that version; the calls go on

The server's policy version is the client's: 1 with the weights that training starts from, and one
more with each step; after a restart it continues after the last published version. Engines that
sleep while SkyRL trains get no call. `configs/skyrl/math.sh` is an example. Run with skyrl 0.3.0.
"""

from __future__ import annotations

import asyncio
import os
import sys
import typing
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import typing_extensions
from envserver_records import ConfigError
from envserver_records.http_errors import TOKEN_VARIABLE

from .skyrl import EnvserverGenerator
from .trainers_engines import TrainersEngines

if sys.version_info < (3, 12):  # else pydantic refuses a type of SkyRL's
    typing.TypedDict = typing_extensions.TypedDict

URL_VARIABLE = "ENVSERVER_URL"


def use_server(client: Any, engines: TrainersEngines) -> Any:
    """Makes SkyRL's inference client also tell `engines`' server; returns the client."""
    kind = type(client)

    class EnvserverClient(kind):  # type: ignore[misc, valid-type]
        async def pause_generation(self, *args: Any, **settings: Any) -> Any:
            await engines.pause()
            return await super().pause_generation(*args, **settings)

        async def sleep(self, *args: Any, **settings: Any) -> Any:
            await engines.pause()
            return await super().sleep(*args, **settings)

        def increment_weight_version(self) -> None:
            super().increment_weight_version()
            publish = engines.publish(self.server_urls, self.weight_version)
            with ThreadPoolExecutor(1) as pool:  # SkyRL calls this inside of its event loop
                pool.submit(asyncio.run, publish).result()

    client.__class__ = EnvserverClient
    return client


def experiment(url: str, token: str | None = None) -> type[Any]:
    """Returns SkyRL's `BasePPOExp` with the server at `url` between its engines and its trainer."""
    from skyrl.train.entrypoints.main_base import (  # type: ignore[import-not-found, unused-ignore]
        BasePPOExp,
    )

    class EnvserverExp(BasePPOExp):  # type: ignore[misc, unused-ignore]
        def get_inference_client(self) -> Any:
            engines = TrainersEngines(url, token=token, counts_on=True)
            return use_server(super().get_inference_client(), engines)

        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
            return EnvserverGenerator(
                url,
                token=token,
                step_wise=cfg.generator.step_wise_trajectories,
                temperature=cfg.trainer.algorithm.temperature,
            )

    return EnvserverExp


def main() -> None:
    """Trains as SkyRL's `main_base` does, with its settings. Raises ConfigError: ENVSERVER_URL is
    not set."""
    import ray  # type: ignore[import-not-found, unused-ignore]
    from skyrl.train.config import (  # type: ignore[import-not-found, unused-ignore]
        SkyRLTrainConfig,
    )
    from skyrl.train.utils import validate_cfg  # type: ignore[import-not-found, unused-ignore]
    from skyrl.train.utils.utils import (  # type: ignore[import-not-found, unused-ignore]
        initialize_ray,
    )

    url = os.environ.get(URL_VARIABLE)
    if not url:
        raise ConfigError("No server is configured.", hint=f"Set {URL_VARIABLE}.")
    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(config)
    initialize_ray(config)
    ray.get(ray.remote(num_cpus=1)(_run).remote(config, url, os.environ.get(TOKEN_VARIABLE)))


def _run(config: Any, url: str, token: str | None) -> None:
    experiment(url, token)(config).run()


if __name__ == "__main__":
    main()

"""Runs the process: loads, listens, prints the address, serves, shuts down in order."""

from __future__ import annotations

import asyncio
import signal
import sys

import torch
import uvicorn
from envserver_records.errors import EnvserverError

from envserver.models.sim.server import QuietServer, listening_socket

from .adapters import Adapters
from .checking import check
from .generation import Generator
from .loading import Loaded, load
from .options import Options
from .row_requests import Asking
from .runner import Runner
from .scheduler import Scheduler
from .server import local_app

FIRST_VERSION = "default"
"""Version of the weights until another one is set; the same as vLLM's."""
_SECONDS_FOR_OPEN_REQUESTS = 2
_SWITCH_SECONDS = 0.0005
"""Interpreter switch interval. Torch releases the interpreter lock at each operation; with the
default it would wait 5 ms for it whenever the event loop is busy.
"""


def run(options: Options) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        asyncio.run(_serve(options, load(options)))
    except EnvserverError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


async def _serve(options: Options, loaded: Loaded) -> None:
    adapters = Adapters(loaded.model)
    generator = Generator(
        loaded.model, adapters, processed=options.logprobs_mode == "processed_logprobs"
    )
    check(generator)
    scheduler = Scheduler(options.max_batch_size, _most_places(options, loaded))
    with listening_socket(options.host, options.port) as listener:
        async with Runner(generator, scheduler, loaded.text, FIRST_VERSION) as runner:
            asking = Asking(
                runner,
                loaded.text,
                adapters,
                model=options.name,
                root=options.model,
                most_tokens=loaded.most_tokens,
                vocabulary=loaded.model.get_input_embeddings().num_embeddings,
                defaults=loaded.defaults,
            )
            server = QuietServer(
                uvicorn.Config(
                    local_app(asking, lora=options.enable_lora),
                    log_level="warning",
                    access_log=False,
                    server_header=False,
                    lifespan="off",
                    timeout_graceful_shutdown=_SECONDS_FOR_OPEN_REQUESTS,
                )
            )
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, _end, server, runner)
            name = f"[{options.host}]" if ":" in options.host else options.host
            sys.stdout.write(f"http://{name}:{listener.getsockname()[1]}/v1\n")
            sys.stdout.flush()
            await server.serve(sockets=[listener])


def _end(server: uvicorn.Server, runner: Runner) -> None:
    """Ends open answers as they are, so that waiting clients get a response."""
    server.should_exit = True
    runner.end()


def _most_places(options: Options, loaded: Loaded) -> int:
    """Returns the number of tokens whose keys and values fit the memory budget."""
    config = loaded.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each = 2 * config.num_hidden_layers * heads * size * loaded.model.dtype.itemsize
    return max(loaded.most_tokens, int(options.kv_cache_gib * 2**30 / each))

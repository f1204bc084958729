"""Runs the process: loads and checks the model, listens, prints the address, serves, shuts down.

Masks, positions, cache and attention are this engine's own code and may be wrong for an unknown
architecture. So a few tokens sampled here are compared with a plain pass without a cache and with
transformers' own attention.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import msgspec
import torch
import uvicorn
from envserver_records.errors import ConfigError, EnvserverError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from . import kv_cache
from .generation import Generator
from .options import Options
from .routes import Asking
from .rows import Row, Sampling, Scheduler
from .runner import Runner
from .server import local_app
from .serving import QuietServer, listening_socket, url_of
from .text import Text
from .weights import Adapters

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MOST_TOKENS = 32_768
"""Maximum context length if neither the model nor the user sets a smaller one."""


class Loaded(msgspec.Struct, frozen=True):
    """A loaded model.

    Args:
        most_tokens: maximum number of tokens of a prompt and its answer together.
        defaults: sampling settings of the model's generation config.
    """

    model: PreTrainedModel
    text: Text
    most_tokens: int
    defaults: dict[str, float]


def load(options: Options) -> Loaded:
    device = _device(options)
    try:
        trust = options.trust_remote_code
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=trust)
        tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=trust)
        model = AutoModelForCausalLM.from_pretrained(
            options.model,
            config=config,
            attn_implementation=kv_cache.NAME,
            dtype=_dtype(options, config, device),
            trust_remote_code=trust,
            **_quantized(options, device),
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"The model {options.model!r} cannot be loaded: {error}",
            hint="Name a folder with config.json, weights and tokenizer, or a model on the hub.",
        ) from error
    if not options.load_in_4bit:
        model.to(device)
    model.eval().requires_grad_(False)
    generation = model.generation_config or GenerationConfig()
    said = generation.to_diff_dict()
    text_config = config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", None) or _MOST_TOKENS
    return Loaded(
        model=model,
        text=Text(
            tokenizer,
            _stop_ids(tokenizer, generation, text_config),
            options.default_chat_template_kwargs,
        ),
        most_tokens=min(longest, options.max_model_len or _MOST_TOKENS),
        defaults={name: said[name] for name in _SAMPLING if said.get(name) is not None},
    )


def _device(options: Options) -> torch.device:
    if options.device != "auto":
        return torch.device(options.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(options: Options, config: Any, device: torch.device) -> torch.dtype:
    if options.dtype != "auto":
        found: torch.dtype = getattr(torch, options.dtype)
        return found
    # On a CPU half precision is slower, not faster, and not exact.
    return torch.float32 if device.type == "cpu" else getattr(config, "dtype", torch.float32)


def _quantized(options: Options, device: torch.device) -> dict[str, Any]:
    if not options.load_in_4bit:
        return {}
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        raise ConfigError(
            "4 bits need bitsandbytes, which is not installed.",
            hint="pip install bitsandbytes accelerate, or leave --load-in-4bit out.",
        ) from error
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    return {"quantization_config": settings, "device_map": {"": device}}


def _stop_ids(tokenizer: Any, generation: Any, config: Any) -> list[int]:
    """Returns the tokenizer's end token first, then those in the model's configurations."""
    ids: list[int] = []
    for found in (
        tokenizer.eos_token_id,
        generation.eos_token_id,
        getattr(config, "eos_token_id", None),
    ):
        for index in found if isinstance(found, list) else [found]:
            if index is not None and index not in ids:
                ids.append(index)
    return ids


_PROMPT = 24
_SAMPLED = 4
_PLAIN = "eager"
_TOLERANCES = {torch.float32: 1e-3}
_ROUGH = 0.5
"""Tolerance of a logprob in half precision or 4 bits, where other sums differ visibly."""


def check(generator: Generator) -> float:
    """Returns the largest difference of a logprob, for two prompts that were sampled together."""
    model = generator.model
    size = model.get_input_embeddings().num_embeddings
    rows = [
        Row([(7 + 31 * place) % size for place in range(length)], Sampling(max_tokens=_SAMPLED))
        for length in (_PROMPT, _PROMPT // 2)
    ]
    try:
        generator.join(rows)
        for _ in range(_SAMPLED):
            generator.step()
        difference = max(_difference(model, row) for row in rows)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The local engine cannot run a {type(model).__name__}: {error}.",
            hint=kv_cache.OTHERS,
        ) from error
    finally:
        generator.forget()
    if not difference <= _TOLERANCES.get(model.dtype, _ROUGH):
        raise ConfigError(
            f"The local engine computes {type(model).__name__} otherwise than transformers: a "
            f"logprob differs by {difference:.2g}.",
            hint=kv_cache.OTHERS,
        )
    return difference


def _difference(model: PreTrainedModel, row: Row) -> float:
    ids = torch.tensor([row.tokens], device=model.device)
    own = model.config._attn_implementation
    model.set_attn_implementation(_PLAIN)
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(own)
    logprobs = logits[len(row.prompt) - 1 : -1].log_softmax(dim=-1)
    expected = logprobs.gather(1, ids[0, len(row.prompt) :, None])[:, 0]
    found = torch.tensor(row.logprobs, device=model.device)
    return float((expected - found).abs().max())


FIRST_VERSION = "default"
"""Version of the weights until another one is set; the same as vLLM's."""
_SECONDS_FOR_OPEN_REQUESTS = 2
_SWITCH_SECONDS = 0.0005
"""Interpreter switch interval. Torch releases the interpreter lock at each operation; with the
default it would wait 5 ms for it whenever the event loop is busy.
"""


def run(options: Options) -> int:
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
            sys.stdout.write(f"{url_of(options.host, listener)}\n")
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

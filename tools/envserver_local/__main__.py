"""Starts the engine: python -m envserver_local --help."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Literal, get_args

import msgspec
from envserver_records.extras import install_command

_DESCRIPTION = "The engine's command-line options."
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    dtype: Dtype = "auto"
    device: str = "auto"
    max_model_len: int = 0
    max_batch_size: int = 64
    kv_cache_gib: float = 4.0
    load_in_4bit: bool = False
    enable_lora: bool = False
    threads: int = 0
    trust_remote_code: bool = False
    default_chat_template_kwargs: dict[str, Any] = {}
    logprobs_mode: LogprobsMode = "raw_logprobs"

    @property
    def name(self) -> str:
        return self.served_model_name or self.model


def parse(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m envserver_local",
        description=_DESCRIPTION,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder, or a name on the hub")
    add("--host")
    add("--port", type=int, help="0 takes a free one")
    add("--served-model-name", help="what requests call it (default: --model)")
    add("--dtype", choices=get_args(Dtype))
    add("--device", help="cpu, cuda, mps (default: what there is)")
    add("--max-model-len", type=int, help="tokens of prompt and answer together")
    add("--max-batch-size", type=int, help="answers sampled at the same time")
    add("--kv-cache-gib", type=float, help="memory for keys and values")
    add("--load-in-4bit", action="store_true", help="by bitsandbytes")
    add("--enable-lora", action="store_true", help="adapters may be loaded while it runs")
    add("--threads", type=int, help="of torch (default: its own choice)")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add(
        "--default-chat-template-kwargs",
        type=json.loads,
        help="template variables of every request, as JSON",
    )
    add(
        "--logprobs-mode",
        choices=get_args(LogprobsMode),
        help="of sampled tokens: the model's own, or those after temperature and filters",
    )
    return Options(**vars(parser.parse_args(arguments)))


def main() -> int:
    """Serves until SIGTERM or SIGINT; returns 2 if it cannot start."""
    options = parse()
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        sys.stderr.write(
            f"The local engine needs torch and transformers: {error}.\n"
            f"Install them: {install_command('local')}.\n"
        )
        return 2
    from .server import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())

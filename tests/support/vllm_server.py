"""A real vLLM on this machine's CPU with a tiny random model, for as long as a `with` lasts."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from envserver_clients.weights import VllmFull

from envserver.models import vllm_extension
from support.commands import free_port

from .waiting import PATIENCE

MODEL = "tiny"
CONTEXT = 65_536
"""Tokens of a long context: a coding program's first prompt has up to 20,000."""
_PROBES = 3
_PROBED_TOKENS = 500
_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class VllmServer:
    """A running server.

    Args:
        base_url: its address with `/v1`.
        model: the name under which it serves its only model.
        model_folder: the model's files, the tokenizer's among them.
        log: what it wrote.
    """

    base_url: str
    model: str
    model_folder: Path
    log: Path

    @property
    def root_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    def begin_anew(self, folder: Path) -> None:
        """Gives an engine that takes weights those of its model's files again.

        Args:
            folder: for files on their way.
        """

        def save(where: Path) -> None:
            shutil.copytree(self.model_folder, where, dirs_exist_ok=True)

        VllmFull(self.base_url, folder / "base").publish(0, save)

    @functools.cached_property
    def same_sums_tokens(self) -> int:
        """So many first tokens get the very same logprobs sampled and scored as a prompt.

        Beyond, vLLM on a CPU adds up a prompt and an answer in different orders; where that begins
        depends on the machine's caches (224 and 480 were seen). Measured without us in between.
        """
        with httpx.Client(base_url=self.base_url, timeout=PATIENCE) as client:
            return min(_first_difference(client, self.model, seed) for seed in range(_PROBES))


@contextlib.contextmanager
def running_vllm(
    python: Path,
    folder: Path,
    *,
    learning: bool = False,
    long: bool = False,
    tied: bool = False,
    sees: str = "",
    model: Path | None = None,
    more: Sequence[str] = (),
    port: int | None = None,
) -> Iterator[VllmServer]:
    """Makes the model in `folder` and serves it on `port`, or a free one.

    Args:
        learning: sampling can be paused, and it takes new weights and LoRA adapters.
        long: it has room for `CONTEXT` tokens, and a request can set its text (forced_text.py).
        tied: the model's output layer is its embedding.
        sees: it takes images too, as `tiny_vlm.py` makes a model of this kind.
        model: this model instead.
        more: further words of its command line.

    Raises:
        RuntimeError: it did not come up; its last words are in the message.
    """
    model_folder = model or folder / "model"
    script = Path(__file__).with_name("tiny_model.py")
    environ = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The engine computes itself, in one thread: half the CPU of asking a process of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    if long:
        environ["PYTHONPATH"] = str(script.parents[1])
    if learning:
        environ = vllm_extension.extended(environ)
    made: list[str | Path] = [python, script, model_folder, *(["0", "tied"] if tied else [])]
    if sees:
        made = [python, "-m", "support.tiny_vlm", model_folder, sees]
    if model is None:
        subprocess.run(made, check=True, env=environ, capture_output=True, cwd=script.parents[1])
    port = port or free_port()
    log = folder / "vllm.log"
    command: list[str | Path] = [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model_folder, "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(CONTEXT if long else 2048)),
        # A prompt that is worked on in parts ends vLLM on a CPU if its request has a seed.
        *("--max-num-batched-tokens", str(CONTEXT if long else 32768)),
        *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *more,
    ]
    if long:
        command += ["--hf-overrides", f'{{"max_position_embeddings": {CONTEXT}}}']
        command += ["--logits-processors", "support.forced_text:ForcedText"]
    if learning:
        command += [*vllm_extension.ARGUMENTS, "--enable-lora", "--max-lora-rank", "16"]
        command += vllm_extension.GLOO_ARGUMENTS
        command += ["--max-loras", "2", "--max-cpu-loras", "8"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_healthy(process, f"http://127.0.0.1:{port}/health", log)
        yield VllmServer(f"http://127.0.0.1:{port}/v1", MODEL, model_folder, log)
    finally:
        _end(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=PATIENCE).status_code == 200:
                return
        time.sleep(0.25)
    tail = log.read_text(errors="replace")[-4000:]
    raise RuntimeError(f"vLLM did not come up (exit status {process.poll()}):\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and the engine process that it started: its whole process group."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)


def _first_difference(client: httpx.Client, model: str, seed: int) -> int:
    asked = {"model": model, "temperature": 1.0, "seed": seed, "return_token_ids": True}
    sampled = client.post(
        "/completions",
        json={
            **asked,
            "prompt": f"Hello, number {seed}",
            "max_tokens": _PROBED_TOKENS,
            "ignore_eos": True,
            "logprobs": 0,
        },
    ).json()["choices"][0]
    prompt, answer = sampled["prompt_token_ids"], sampled["token_ids"]
    scored = client.post(
        "/completions",
        json={**asked, "prompt": prompt + answer, "max_tokens": 1, "prompt_logprobs": 0},
    ).json()["choices"][0]["prompt_logprobs"]
    for at, (token, logprob) in enumerate(
        zip(answer, sampled["logprobs"]["token_logprobs"], strict=True), start=len(prompt)
    ):
        if scored[at][str(token)]["logprob"] != logprob:
            return at
    return len(prompt) + len(answer)

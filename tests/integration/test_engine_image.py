"""docker/Dockerfile.vllm on a stand-in for vLLM's image: how the engine is started.

The image for CPUs is not built here: it takes gigabytes. docker/README.md says how it was tried.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import orjson
import pytest
from support.commands import free_port, until
from support.docker_engine import Engine
from support.our_images import Images
from support.waiting import PATIENCE

# Takes the place of vLLM: it answers with how it was started.
SERVER = """
import http.server, importlib, json, os, sys
words = sys.argv[1:]
extension, name = words[words.index("--worker-extension-cls") + 1].split(".")
names = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "HOME")
facts = {
    "words": words,
    "extension": hasattr(getattr(importlib.import_module(extension), name), "envserver_reload"),
    "variables": {name: os.environ[name] for name in names},
    "user": [os.getuid(), os.getgid()],
    "writable": os.access("/models", os.W_OK),
}
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(facts).encode())
place = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
http.server.HTTPServer(place, Answer).serve_forever()
"""
STAND_IN = """
ARG BASE
FROM ${BASE}
COPY api_server.py /stand-in/vllm/entrypoints/openai/
RUN ln -s /stand-in/vllm "$(python3 -c 'import site; print(site.getsitepackages()[0])')/vllm"
"""


@pytest.fixture
def images(docker_engine: Engine, tmp_path: Path) -> Images:
    return Images(docker_engine, tmp_path)


def test_vllm_is_started_with_what_envserver_uses(images: Images, tmp_path: Path) -> None:
    engine, folder, port = images.engine, tmp_path / "stand-in", free_port()
    folder.mkdir()
    (folder / "Dockerfile").write_text(STAND_IN)
    (folder / "api_server.py").write_text(SERVER)
    base = ("--build-arg", f"BASE={engine.python_image}")
    engine.output("build", "--network", "host", "--tag", "vllm-stand-in", *base, folder)
    image = images.build("Dockerfile.vllm", "envserver-engine:gpu", base="vllm-stand-in")
    options = ("--env", "HOST=127.0.0.1", "--env", f"PORT={port}", "--user", "123456:0")
    run = ("run", "--detach", "--network", "host", "--read-only", *options, image)
    container = engine.output(*run, "--model", "Qwen/Qwen3-4B").strip()
    try:
        facts = answer(f"http://127.0.0.1:{port}", engine, container)
        words = " ".join(facts["words"])
        for part in (
            "--enable-scale-out",
            "--enable-auto-tool-choice --tool-call-parser hermes",
            "--model Qwen/Qwen3-4B",
        ):
            assert part in words
        assert facts["extension"] and facts["user"] == [123456, 0]
        assert facts["variables"] == {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "HOME": "/models",
        }
        assert engine.run("exec", container, "engine", "healthy").returncode == 0
    finally:
        engine.output("rm", "--force", "--volumes", container)


def answer(url: str, engine: Engine, container: str) -> dict[str, object]:
    def asked() -> bytes:
        try:
            return httpx.get(url, timeout=PATIENCE).content
        except httpx.TransportError:
            return b""

    return dict(orjson.loads(until(asked, lambda: engine.output("logs", container))))

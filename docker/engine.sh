#!/bin/sh
# Starts vLLM with the flags that envserver uses; the arguments are further ones. `engine healthy` asks it.
if [ "$1" = healthy ]; then
  exec python3 -c "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ['PORT']}/health\", timeout=5)"
fi
# shellcheck disable=SC2086  # FLAGS are words
exec python3 -m vllm.entrypoints.openai.api_server --host "$HOST" --port "$PORT" \
  --enable-scale-out --enable-auto-tool-choice --tool-call-parser "$PARSER" \
  --worker-extension-cls envserver_reload.ReloadWeights $FLAGS "$@"

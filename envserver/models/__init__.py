"""Engines behind the proxy; README.md draws the path of a request.

engine       the interface that every engine implements
openai       any OpenAI-compatible server, or several replicas of one; below it
             connections, decoding, sse (HTTP), replicas, retrying (choice and retries),
             breaker, monitor (health), slots, adaptive (calls in flight)
probe        finds out what an engine can do; below it probe_modes, probe_client
model_files  where a served model's tokenizer and chat template are
manager      starts engines and keeps them running
sim          the simulated engine, for tests, load and demos
local        a small engine on transformers
"""

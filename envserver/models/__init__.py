"""Engines behind the proxy.

engine       the seam: what every engine offers
openai       any OpenAI-compatible server, or several replicas of one; below it
             connections, decoding, sse (HTTP), replicas, retrying (which one, how often),
             breaker, watch (who is well), slots, adaptive (how many calls at once)
upstream     how an engine can be asked, found by probing; below it probe_modes, probing
model_files  where a served model's tokenizer and chat template are
sim          the simulated engine: a script for tests, load and demos
"""

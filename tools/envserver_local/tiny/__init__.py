"""A language model of a million parameters that learns on a laptop: see README.md.

In: expert trajectories as `envserver process` writes them. Out: a folder that transformers, the
local engine and vLLM load. `training` imports torch and needs the extra `local`;
`from_experts` imports it when it starts to train.
"""

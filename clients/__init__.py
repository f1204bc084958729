"""For trainers and data makers: what they use to get groups from a server.

`http` has the clients (`EnvClient`, `SyncEnvClient`), `records` what they give.
"""

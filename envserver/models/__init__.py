"""Engines behind the proxy: whatever samples tokens, over the one seam of `models.engine`.

In flow OpenAI-shaped request bodies, out flow decoded answers or chunks. An engine raises only the
EngineError kinds, hides the number of its replicas, and retries by itself what is safe to retry.
`models.openai` speaks to any OpenAI-compatible server over HTTP; `models.sim` is a simulated one.
"""

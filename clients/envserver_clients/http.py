"""HTTP clients for trainers: lease, train, acknowledge. One for asyncio, one for everybody else.

The whole life of a trainer, which may be killed at any moment and started again:

    saved = load_checkpoint()                    # None at the very first start
    with SyncEnvClient(url, run="my-run", batch_size=16, keep_leases_seconds=600) as client:
        if saved is not None:
            client.ack(saved.lease_id, checkpoint=saved.name)   # that ack may have been lost
        client.resume(None if saved is None else saved.name)    # what it had not learned comes
        step = 0 if saved is None else saved.step
        for batch in client.stream():            # the next batch is fetched while this one trains
            train(batch.rows)                    # numpy: tokens, mask, logprobs, reward
            step += 1
            save_checkpoint(f"step-{step}", step, batch.lease_id)
            client.ack(batch, checkpoint=f"step-{step}")
            client.publish_policy_version(step)

What is not acknowledged in time is delivered again, so a trainer that dies loses nothing; what is
acknowledged never comes again, unless the trainer goes back to an older checkpoint. A request that
fails on its way, or that the server cannot answer just now, is repeated with growing pauses, and a
copy of it that arrives twice counts once.

    EnvserverError
    ├── ServerUnreachable    no answer after all tries
    ├── NotAllowed           the server wants a token (ENVSERVER_TOKEN), or another one
    ├── NotFoundError        no such run, lease or checkpoint
    ├── ConflictError        the lease expired and its groups went elsewhere; the run is closed; a
    │                        version went down
    ├── InputError           the server refused what was sent, or sent what cannot be read
    └── StoreError           the server's store failed
"""

from __future__ import annotations

from .aio import EnvClient
from .protocol import NotAllowed, Retries, ServerUnreachable, Wanted
from .sync import SyncEnvClient

__all__ = ["EnvClient", "NotAllowed", "Retries", "ServerUnreachable", "SyncEnvClient", "Wanted"]

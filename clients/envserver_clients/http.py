"""HTTP clients for trainers: lease, train, acknowledge; with asyncio or without.

A whole trainer, which may be killed at any moment and started again:

    saved = load_checkpoint()                    # None at the very first start
    with SyncEnvClient(url, run="my-run", batch_size=16, keep_leases_seconds=600) as client:
        if saved is not None:
            client.ack(saved.lease_id, checkpoint=saved.name)   # the ack may have been lost
        client.resume(None if saved is None else saved.name)    # redelivers what was not learned
        step = 0 if saved is None else saved.step
        for batch in client.stream():            # the next batch is fetched while this one trains
            train(batch.rows)                    # numpy: tokens, mask, logprobs, reward
            step += 1
            save_checkpoint(f"step-{step}", step, batch.lease_id)
            client.ack(batch, checkpoint=f"step-{step}")
            client.publish_policy_version(step)

A group that the trainer cannot use is taken out of its batch with `client.set_aside(batch,
[group.group_id], reason="...")`: it never comes again, and the others are acknowledged as usual.

Groups that are not acknowledged in time are delivered again, so a trainer that dies loses nothing.
Acknowledged groups never come again, unless the trainer goes back to an older checkpoint. A request
that fails on its way, or that the server cannot answer now, is repeated with growing pauses; the
server counts repetitions once. Where several servers share a store, `url` is a list of their URLs,
or a text with commas: a request that one of them cannot answer goes to the next at once.

    EnvserverError
    ├── ServerUnreachable    the server did not answer after all tries
    ├── NotAllowed           the token (ENVSERVER_TOKEN) is missing or not accepted
    ├── NotFoundError        the run, lease or checkpoint does not exist
    ├── ConflictError        the lease expired and its groups went elsewhere; the run is closed; a
    │                        policy version decreased
    ├── InputError           the server rejected the request, or its answer cannot be read
    └── StoreError           the server's store failed
"""

from .aio import EnvClient
from .protocol import BatchLimits, NotAllowed, Retries, ServerUnreachable
from .sync import SyncEnvClient

__all__ = [
    "EnvClient", "NotAllowed", "Retries", "ServerUnreachable", "SyncEnvClient", "BatchLimits",
]  # fmt: skip

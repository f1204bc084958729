"""A trainer on a Ray cluster, which starts its server there: trainer.py ADDRESS FOLDER."""

from __future__ import annotations

import json
import sys

import ray

import envserver

ray.init(address=sys.argv[1], log_to_driver=False)
server = envserver.ray_server(
    "math",
    num_cpus=0,
    model="sim",
    env={"group_size": 2},
    workers={"processes": 1},
    ray={"runners": 1},
    store=f"{sys.argv[2]}/inside.db",
)
batch = server.batch(4)
assert batch is not None
server.ack(batch, checkpoint="step-1")
others = envserver.RayServer.named()
row = batch.rows[0]
facts = {
    "groups": len(batch.groups),
    "rows": len(batch.rows),
    "dtypes": [str(row.tokens.dtype), str(row.logprobs.dtype)],
    "same": others.url == server.url,
    "url": server.url,
}
server.close()
sys.stdout.write(json.dumps(facts) + "\n")

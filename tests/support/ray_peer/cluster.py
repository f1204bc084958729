"""A Ray cluster on this machine, which the test on stdin grows and shrinks. Run by `ray_python`.

cluster.py NODES     prints {"address": ...}; then a line of JSON for each line that it reads:
add                  another node: {"node": its number}
kill N               SIGKILL to all processes of a node
end                  ends everything that it started, as the end of stdin does
"""

from __future__ import annotations

import json
import os
import shutil
import sys

# A dead node is seen after three seconds; runners compete with the rest of the tests as equals.
os.environ.update(
    {
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_worker_niceness": "0",
    }
)

from ray.cluster_utils import Cluster

MEMORY = 80 * 2**20


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False},
    )
    nodes = {}

    def add() -> int:
        number = len(nodes)
        nodes[number] = cluster.add_node(
            num_cpus=1,
            resources={"env": 1},
            labels={"zone": "ab"[number % 2]},
            object_store_memory=MEMORY,
        )
        return number

    try:
        for _ in range(int(sys.argv[1])):
            add()
        answer({"address": cluster.address})
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "add":
                answer({"node": add()})
            elif word == "kill":
                cluster.remove_node(nodes[int(rest[0])], allow_graceful=False)
                answer({})
            else:
                return
    finally:
        logs = cluster.head_node.get_session_dir_path()
        cluster.shutdown()
        shutil.rmtree(logs, ignore_errors=True)


def answer(facts: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


main()

"""Where the programs run that a model wrote: no network, nothing of ours, an end to all they use.

Specs go in, sandboxes come out (`sandbox_interface.Sandboxes`). What always holds: a sandbox dies with
the connection that opened it, everything with the server; where no wall holds, nothing is started.

    service      the wall is chosen (walls, probe), the supervisor started and kept alive
    supervisor   makes sandboxes by forking them from zygotes, and outlives none of its users
    inside       the server in a sandbox: runs, bounds and measures programs (execution, program)
    client       sandboxes for asyncio; blocking: without; watched: for scorers and `tasks`
    rooms        the sandboxes of attempts in flight, which workers ask for over HTTP (requests)
"""

"""Several servers on one store: followers pass requests on to the leader (docs/several-servers.md).

`app` is what a follower answers with, `passing` and `sockets` pass requests and WebSockets on,
`link` holds the connections to the leader, `origin` restores at the leader who asked the follower,
`facts` says who leads.
"""

"""Several servers on one store: followers pass requests on to the leader (docs/several-servers.md).

`app` is what a follower answers with: it passes requests and WebSockets on. `link` holds the
connections to the leader, says who leads, and restores at the leader who asked the follower.
"""

"""Runners: environments on other machines (`envserver join`), and how they share the server.

`routes` are their HTTP routes, `registry` keeps track of them, `posted_groups` and `validation`
check their groups, `allotment` and `sharing` decide how many groups each may have open, and
`local_sink` gives an environment in the server's process its share.
"""

"""Runners: environments on other machines (`envserver join`), and how they share the server.

`routes` are their HTTP routes, `registry` answers them and reads their groups, `validation` checks
the groups, `runner` keeps track of the runners, `news` informs them, `sharing` decides how many
groups each may have open, and `local_sink` gives an environment in the server's process its share.
"""

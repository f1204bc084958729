"""Access control: roles, quotas and connection limits.

`tokens` keeps access tokens, `rules` maps routes to roles, `middleware` enforces them before the
application, `quotas` limits rates, `connections` limits HTTP connections.
"""

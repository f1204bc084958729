"""Who may ask, how often, and over what connections.

`tokens` keeps access tokens, `rules` says which role may ask for which route, `middleware` stands
before the application, `quotas` counts, `connections` bounds HTTP itself.
"""

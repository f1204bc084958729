"""HTTP for trainers and people: the native routes under /v1, the Atropos wire at the root, health.

`app.create_api` makes the application over an open store, `server.serve_api` serves it.
"""

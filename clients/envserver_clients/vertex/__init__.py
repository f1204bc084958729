"""`python -m envserver_clients.vertex`: supervised tuning by the managed service Vertex AI.

Invariant: each step is recorded in the output folder's `state.json` before the next begins, so the
same command continues after any interruption and never launches a job twice.

Facts are from Google's public documentation: "Prepare supervised fine-tuning data for Gemini
models", "About supervised fine-tuning for Gemini models" (limits), "Tune an open model", and the
REST reference of projects.locations.tuningJobs. Tested against a stand-in of that API, never
against the service itself: see README.md.
"""

"""`python -m envserver_clients.vertex`: supervised tuning by a managed service, Vertex AI.

In: rows of `envserver export --to messages`, of `envserver sft build`, or with prompt and
completion. Out: a tuned model there (its endpoint), and where the service exports one, the adapter
here. What holds: every step is in the output folder's `state.json` before the next begins, so that
the same command goes on after any end, and one training is never launched twice.

    settings     what may be set
    examples     rows -> lines in the service's form, within its limits
    state        what was done, in the output folder
    bucket       files to and from a bucket, by fsspec
    api          the service's tuning jobs over REST, with tokens and patience
    command      prepare -> upload -> launch -> watch -> fetch

Facts are from Google's public documentation: "Prepare supervised fine-tuning data for Gemini
models", "About supervised fine-tuning for Gemini models" (limits), "Tune an open model", and the
REST reference of projects.locations.tuningJobs. Tested against a stand-in of that API, never
against the service itself: see README.md.
"""

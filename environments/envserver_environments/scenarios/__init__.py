"""Small pieces of work in a workspace, done by a model that speaks the text protocol."""

"""The Python that executes the model's code, in a process of its own. Importing it costs little."""

"""What agents use: each tool is a module with the function, and its description for the model."""

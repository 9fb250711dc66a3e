"""A run folder: a `run.toml` that says model, data and method, and beside it all that was made."""

"""Models of other libraries: their networks, schedulers, encoders and pipelines, made ready."""

"""TIDE: TID's rankings, distilled into embeddings of the model's own activations."""

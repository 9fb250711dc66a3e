"""Ranking a training set for a query: what every attributor promises, and what it gives back."""

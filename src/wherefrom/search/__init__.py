"""Stored vectors of a training set, exact and approximate search among them, and their export."""

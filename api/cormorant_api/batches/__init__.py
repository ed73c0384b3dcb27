"""Batches on their way to consumers."""

"""Inference servers: processes that serve the environments of many workers with one copy of the policy."""

"""Inference servers: processes that act for the environments of many workers with one copy of the policy."""

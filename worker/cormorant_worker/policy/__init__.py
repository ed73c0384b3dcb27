"""Policies: loading a user's policy, computing actions with it, and the built-in policies."""

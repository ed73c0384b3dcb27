"""Talks to the API server: requests, watches, the leader's lease."""

"""Prometheus metrics of a fleet, as the contract declares them."""

"""Builds Kubernetes objects as JSON. Pure."""

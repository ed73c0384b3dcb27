"""The head: the control plane of one job, a FastAPI application over a fleet."""

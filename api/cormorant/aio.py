"""The client for programs that run an event loop of their own: `connect` and `Client` as coroutines."""

from cormorant_client.aio import AsyncClient

__all__ = ["AsyncClient"]

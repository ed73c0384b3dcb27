"""The client for programs with an asyncio event loop: the calls of `Client` as coroutines.

async with AsyncClient("http://127.0.0.1:8000", token_file="tokens.json") as client: ...
async with AsyncClient(cormorant.connect("pong", namespace="rl")) as client: ...
"""

from cormorant_contract.errors import needs

with needs("client"):
    from cormorant_client.aio import AsyncBatches, AsyncClient, AsyncUpdate

__all__ = ["AsyncBatches", "AsyncClient", "AsyncUpdate"]

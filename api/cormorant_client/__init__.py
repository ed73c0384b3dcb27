"""The learner's side: publish weights and read batches over HTTP. Needs no Ray, no Kubernetes, no worker, and torch
only where batches become tensors.

    from cormorant_client import connect

    with connect("http://127.0.0.1:8000", token=token) as client:
        for batch in client.batches():
            learn(batch)                       # TorchRL's keys, [B, T]
            client.publish(policy)
"""

from cormorant_client import errors
from cormorant_client.aio import AsyncClient
from cormorant_client.batches import RemoteBatches, StreamOptions
from cormorant_client.client import Client, ConnectOptions, Pause, RemoteShard, connect
from cormorant_client.delivery import Delivery, decode
from cormorant_client.errors import *  # noqa: F403
from cormorant_client.link import LearnerLink, Staleness
from cormorant_client.publishing import PulledWeights, Update

__all__ = [
    "AsyncClient",
    "Client",
    "ConnectOptions",
    "Delivery",
    "LearnerLink",
    "Pause",
    "PulledWeights",
    "RemoteBatches",
    "RemoteShard",
    "Staleness",
    "StreamOptions",
    "Update",
    "connect",
    "decode",
]
__all__ += errors.__all__

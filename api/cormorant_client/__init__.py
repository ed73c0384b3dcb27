"""The learner's side: publish weights and read batches over HTTP. Needs no Ray, no Kubernetes, no worker, and torch
only where batches become tensors.

    from cormorant_client import connect

    with connect("http://127.0.0.1:8000", token=token) as client:
        for batch in client.batches():
            learn(batch)                       # TorchRL's keys, [B, T]
            client.publish(policy)
"""

from cormorant_client.aio import AsyncClient
from cormorant_client.batches import RemoteBatches, StreamOptions
from cormorant_client.client import Client, ConnectOptions, RemoteShard, connect
from cormorant_client.delivery import Delivery, decode
from cormorant_client.errors import (
    BadAddress,
    BadBatch,
    BadTensors,
    BatchGone,
    BatchTimeout,
    ClientError,
    Conflict,
    Forbidden,
    HeadError,
    HeadFailed,
    HeadUnreachable,
    NotFound,
    NotNow,
    Refused,
    StreamEnded,
    TensorMismatch,
    Unauthenticated,
    UpdateFailed,
)
from cormorant_client.link import LearnerLink, Staleness
from cormorant_client.pauses import Pause
from cormorant_client.publishing import Publisher, PulledWeights
from cormorant_client.updates import Update

__all__ = [
    "AsyncClient",
    "BadAddress",
    "BadBatch",
    "BadTensors",
    "BatchGone",
    "BatchTimeout",
    "RemoteBatches",
    "Client",
    "ClientError",
    "Conflict",
    "ConnectOptions",
    "Delivery",
    "Forbidden",
    "HeadError",
    "HeadFailed",
    "HeadUnreachable",
    "LearnerLink",
    "NotFound",
    "NotNow",
    "Pause",
    "Publisher",
    "PulledWeights",
    "Refused",
    "RemoteShard",
    "Staleness",
    "StreamEnded",
    "StreamOptions",
    "TensorMismatch",
    "Unauthenticated",
    "Update",
    "UpdateFailed",
    "connect",
    "decode",
]

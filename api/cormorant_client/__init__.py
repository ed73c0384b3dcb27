"""The learner's side: publish weights and read batches over HTTP. Needs no Ray, no Kubernetes, no worker, and torch
only where batches become tensors.

    from cormorant_client import connect

    with connect("http://127.0.0.1:8000", token=token) as client:
        for batch in client.batches():
            learn(batch.tensordict())          # TorchRL's keys, [B, T]
            client.publish(policy)
"""

from cormorant_client.aio import AsyncClient
from cormorant_client.batch import Batch, decode
from cormorant_client.batches import Batches
from cormorant_client.client import Client, connect
from cormorant_client.errors import (
    BadAddress,
    BadBatch,
    BadTensors,
    BatchGone,
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
from cormorant_client.replay import ReplayFeed, as_dataset, frames_of
from cormorant_client.updates import Update

__all__ = [
    "AsyncClient",
    "BadAddress",
    "BadBatch",
    "BadTensors",
    "Batch",
    "BatchGone",
    "Batches",
    "Client",
    "ClientError",
    "Conflict",
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
    "ReplayFeed",
    "Staleness",
    "StreamEnded",
    "TensorMismatch",
    "Unauthenticated",
    "Update",
    "UpdateFailed",
    "as_dataset",
    "connect",
    "decode",
    "frames_of",
]

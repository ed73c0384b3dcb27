"""The learner's side: publish weights and read batches over HTTP. Needs no Ray, no Kubernetes, no worker, and torch
only where batches become tensors.

    from cormorant_client import connect

    with connect("http://127.0.0.1:8000", token=token) as client:
        for batch in client.batches():
            learn(batch)                       # TorchRL's keys, [B, T]
            client.publish(policy)
"""

from cormorant_client.aio import AsyncClient as AsyncClient
from cormorant_client.batches import RemoteBatches as RemoteBatches
from cormorant_client.batches import StreamOptions as StreamOptions
from cormorant_client.client import Client as Client
from cormorant_client.client import ConnectOptions as ConnectOptions
from cormorant_client.client import connect as connect
from cormorant_client.delivery import Delivery as Delivery
from cormorant_client.errors import *  # noqa: F403
from cormorant_client.link import LearnerLink as LearnerLink
from cormorant_client.publishing import PulledWeights as PulledWeights
from cormorant_client.publishing import Update as Update

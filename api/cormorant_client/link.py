"""A learner's connection in one object: reads batches, publishes weights every n updates, measures staleness."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from cormorant_client.batches import StreamOptions
from cormorant_client.client import Client
from cormorant_client.errors import BatchTimeout
from cormorant_client.publishing import MAIN_MODEL
from cormorant_contract.weights import Publishable

if TYPE_CHECKING:
    from tensordict import TensorDict

_WINDOW = 100
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Age of the weights that chose each action: the version published when a batch was handed out, minus the frame's
    version.
    """

    mean: float
    """Mean over the frames of the last 100 batches with a policy's actions; 0 without any."""
    max: int


class LearnerLink:
    """A learner's connection: batches in, weights out.

    link = LearnerLink(client, policy, publish_every=4)
    for batch in link.batches():
        learn(policy, batch)
        link.step()                            # one update made; every 4th publishes
    """

    def __init__(
        self,
        client: Client,
        weights: Publishable,
        *,
        publish_every: int = 1,
        wait: float = 0.0,
        model: str = MAIN_MODEL,
        **batches: Unpack[StreamOptions],
    ) -> None:
        """Publish the current weights, so that no batch is collected with earlier ones.

        Args:
            client: stays open when the link closes.
            weights: the module (or modules by model name) that is trained; read at every publish.
            publish_every: learner updates between publishes.
            wait: seconds to wait for the workers, as strictly on-policy learning needs. Without it, publishing returns
                once the head has the weights.
            model: name of the model.
            batches: options of `Client.batches`.
        """
        self._client = client
        self._weights = weights
        self._publish_every = publish_every
        self._wait = wait
        self._model = model
        self._wanted = batches
        self.num_updates: int = 0
        """Learner updates so far."""
        self.version: int = client.publish(weights, model=model, wait=wait).version
        """The newest version that this link has published."""
        self._seen: deque[tuple[int, int, int]] = deque(maxlen=_WINDOW)

    def batches(self) -> "Iterator[TensorDict]":
        """Iterate like `Client.batches`, and measure staleness. Publishes again if a new head lacks the weights."""
        with self._client.batches(**self._wanted) as stream:
            while True:
                try:
                    batch = stream.next(_LOOK_S)
                except BatchTimeout:
                    # A head without its predecessor's weights collects nothing for a while, in case a learner has them.
                    if self._client.version < self.version:
                        self.publish()
                    continue
                if batch is None:
                    return
                labels = batch["collector"]
                acted = labels["policy_version"][labels["mask"]] if "mask" in labels else labels["policy_version"]
                acted = acted[acted >= 0]
                if acted.numel():
                    lag = (self.version - acted).clamp(min=0)
                    self._seen.append((acted.numel(), int(lag.sum()), int(lag.max())))
                yield batch

    def step(self) -> None:
        """Count one learner update; publishes after every `publish_every` of them.

        Raises:
            ClientError: the publish failed.
        """
        self.num_updates += 1
        if self.num_updates % self._publish_every == 0:
            self.publish()

    def publish(self) -> None:
        """Publish now."""
        self.version = self._client.publish(self._weights, model=self._model, wait=self._wait).version

    @property
    def staleness(self) -> Staleness:
        """Staleness over the last 100 batches."""
        frames = sum(count for count, _, _ in self._seen)
        total = sum(sum_ for _, sum_, _ in self._seen)
        return Staleness(
            mean=total / frames if frames else 0.0, max=max((most for _, _, most in self._seen), default=0)
        )

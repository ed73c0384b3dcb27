"""The built-in policies `mlp`, `atari_cnn`, `lstm`: factories for `spec.policy.entrypoint`, and modules for learners.

Each factory is `factory(observation_space, action_space, **kwargs)`. The returned module acts when called, and
gives learners the distribution's parameters, log-probabilities and entropies of stored observations and actions.

# n rows, F features, P parameters of the action distributions
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cormorant_worker.policy.networks import ActionHeads, Activation, ImageEncoder, Perceptron, VectorEncoder
from cormorant_worker.spaces import Space

if TYPE_CHECKING:
    from cormorant_worker.policy.recurrent import RecurrentPolicy


def mlp(
    observation_space: Space,
    action_space: Space,
    *,
    hidden: Sequence[int] = (64, 64),
    activation: Activation = "tanh",
    return_log_prob: bool = False,
) -> "Policy":
    """A multi-layer perceptron for vector observations of any nesting.

    Args:
        observation_space: of one environment; its leaves are flattened and joined, Discrete leaves one-hot.
        action_space: of one environment: Discrete, MultiDiscrete or a Box of floats.
        hidden: widths of the hidden layers.
        activation: "tanh" or "relu".
        return_log_prob: also store `action_log_prob` float32 `[n]` of the drawn actions.
    """
    encoder = VectorEncoder(observation_space)
    body = Perceptron(encoder.num_features, hidden, activation)
    num_features = hidden[-1] if hidden else encoder.num_features
    return Policy(encoder, body, num_features, action_space, return_log_prob=return_log_prob)


def atari_cnn(
    observation_space: Space, action_space: Space, *, hidden: int = 512, return_log_prob: bool = False
) -> "Policy":
    """The convolutional network of Mnih et al. 2015 (Nature 518): 32, 64, 64 filters, one hidden layer.

    Args:
        observation_space: Box uint8 `[channels, height, width]`, 0 to 255, at least 36 pixels high and wide.
        action_space: of one environment.
        hidden: width of the hidden layer.
        return_log_prob: also store `action_log_prob` float32 `[n]` of the drawn actions.

    Raises:
        PolicyMismatch: the observation is not an image.
    """
    encoder = ImageEncoder(observation_space)
    body = nn.Sequential(nn.Linear(encoder.num_features, hidden), nn.ReLU())
    return Policy(encoder, body, hidden, action_space, return_log_prob=return_log_prob)


def lstm(
    observation_space: Space, action_space: Space, *, hidden: int = 64, return_log_prob: bool = False
) -> "RecurrentPolicy":
    """An LSTM cell between an encoder and the action heads, by TorchRL's conventions for recurrent states.

    Args:
        observation_space: as for `mlp`.
        action_space: of one environment.
        hidden: width of the encoder's layer and of the LSTM's states.
        return_log_prob: also store `action_log_prob` float32 `[n]` of the drawn actions.
    """
    # Only recurrent policies speak TensorDict in the hot loop, and only they pay for its import.
    from cormorant_worker.policy.recurrent import RecurrentPolicy

    encoder = VectorEncoder(observation_space)
    return RecurrentPolicy(encoder, hidden, action_space, return_log_prob=return_log_prob)


class Policy(nn.Module):
    """encoder -> body -> heads. Calling the module returns actions."""

    def __init__(
        self, encoder: nn.Module, body: nn.Module, num_features: int, action_space: Space, *, return_log_prob: bool
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.body = body
        self.heads = ActionHeads(num_features, action_space)
        self.returns_log_prob = return_log_prob

    def params(self, observation: Any) -> Tensor:
        """Parameters of the action distributions (logits; means and log-deviations): `[n, P]` float32."""
        # `forward` and not a call: four of these a step would cost more than a small layer's arithmetic.
        params = self.heads.forward(self.body.forward(self.encoder.forward(observation)))
        return params.float() if params.dtype == torch.bfloat16 else params

    def forward(self, observation: Any) -> Any:
        """Act: `[n, ...]` observations -> the action, or a mapping with `action` and `action_log_prob`."""
        params = self.params(observation)
        action = self.heads.act(params)
        if not self.returns_log_prob:
            return action
        return {"action": action, "action_log_prob": self.heads.log_prob(params, action)}

    def evaluate(self, observation: Any, action: Any) -> tuple[Tensor, Tensor]:
        """For learners: log-probability `[n]` and entropy `[n]` of stored actions under the current weights."""
        params = self.params(observation)
        return self.heads.log_prob(params, action), self.heads.entropy(params)

"""Built-in policies and their modules. In manifests: `entrypoint: cormorant.policies:mlp`."""

from cormorant_contract.errors import needs

with needs("worker"):
    from cormorant_worker.policy.jax_policy import JaxPolicy
    from cormorant_worker.policy.networks import ActionHeads, ImageEncoder, Perceptron, VectorEncoder
    from cormorant_worker.policy.zoo import Policy, atari_cnn, lstm, mlp

__all__ = [
    "ActionHeads", "ImageEncoder", "JaxPolicy", "Perceptron", "Policy", "VectorEncoder", "atari_cnn", "lstm", "mlp",
]  # fmt: skip

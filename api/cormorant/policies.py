"""Built-in policies and their modules. In manifests: `entrypoint: cormorant.policies:mlp`."""

from cormorant_contract.extras import needs

with needs("worker"):
    from cormorant_worker.policy.networks import ActionHeads, ImageEncoder, Perceptron, VectorEncoder
    from cormorant_worker.policy.zoo import Policy, atari_cnn, lstm, mlp

__all__ = ["ActionHeads", "ImageEncoder", "Perceptron", "Policy", "VectorEncoder", "atari_cnn", "lstm", "mlp"]

"""The built-in policies, under the name that manifests use: `entrypoint: cormorant_worker.policies:mlp`."""

from cormorant_worker.policy.networks import ActionHeads, ImageEncoder, Perceptron, VectorEncoder
from cormorant_worker.policy.zoo import Policy, atari_cnn, lstm, mlp

__all__ = ["ActionHeads", "ImageEncoder", "Perceptron", "Policy", "VectorEncoder", "atari_cnn", "lstm", "mlp"]

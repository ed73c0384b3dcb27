"""The built-in `mlp` with one discrete action, computed in one call on a CPU. A candidate of `compiled.py`.

Environments step between two calls and push torch's code out of the processor's caches: there, a module call and a
small operation cost twice what a loop of calls shows (decision 0043). So this calls torch's BLAS with its own buffers,
uses numpy's vectorized tanh, which differs from torch's by one unit in the last place, and draws the action in numpy.

# n rows, F features, A actions
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cormorant_worker.policy.exploration import is_greedy
from cormorant_worker.policy.networks import ActionHeads, CategoricalHead, Perceptron, gumbel_argmax
from cormorant_worker.policy.zoo import Policy
from cormorant_worker.spaces import Array


def called_whole(acting: object) -> "DenseCategorical | None":
    """A function that computes the policy without its modules; None: not the built-in policy, or modified."""
    if type(acting) is not Policy or type(acting.body) is not Perceptron or type(acting.heads) is not ActionHeads:
        return None
    head, layers = acting.heads.only, [*acting.body.layers, acting.heads.linear]
    if acting.returns_log_prob or type(head) is not CategoricalHead or any(map(_is_changed, acting.modules())):
        return None
    linears = [layer for layer in layers if type(layer) is nn.Linear and layer.weight.dtype == torch.float32]
    if len(linears) < len(layers) or not linears[0].weight.is_cpu:
        return None
    return DenseCategorical(acting, head, linears, is_tanh=acting.body.activation is nn.Tanh)


def _is_changed(module: nn.Module) -> bool:
    """It does not just what its class does."""
    replaced = any(name in module.__dict__ for name in ("forward", "params", "act"))
    return bool(module._forward_hooks or module._forward_pre_hooks or replaced)


class DenseCategorical:
    """Reads the layers' own memory: weights copied into them are used from the next call on."""

    def __init__(self, policy: Policy, head: CategoricalHead, layers: list[nn.Linear], *, is_tanh: bool) -> None:
        self._policy = policy
        self._encode = policy.encoder.forward
        self._layers = [(layer.bias.detach(), layer.weight.detach().t()) for layer in layers]
        self._is_tanh = is_tanh
        self._first = head.first
        self._rows = -1
        self._buffers: list[tuple[Tensor, Array]] = []
        """[n, width] behind each layer, and the same memory as an array; then the noise, [n, A]."""

    def __call__(self, observation: Any) -> Any:
        """Actions `[n]` int64 in new memory, from the same random numbers as the policy's. With a gradient, under
        autocast, or for another dtype or shape, the policy is asked.
        """
        x = self._encode(observation)
        is_recorded = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        if is_recorded or x.dtype != torch.float32 or x.dim() != 2:
            return self._policy(observation)
        if x.shape[0] != self._rows:
            self._rows = x.shape[0]
            widths = [weight.shape[1] for _, weight in self._layers]
            self._buffers = [_buffer(self._rows, width) for width in (*widths, widths[-1])]
        last = len(self._layers) - 1
        for i, (bias, weight) in enumerate(self._layers):
            out, array = self._buffers[i]
            x = torch.addmm(bias, x, weight, out=out)
            if i == last:
                break
            if self._is_tanh:
                np.tanh(array, out=array)
            else:
                torch.relu_(x)
        logits = self._buffers[last][1]
        if is_greedy():
            index: Array = logits.argmax(-1)
        else:
            tensor, noise = self._buffers[-1]
            tensor.exponential_()
            index = gumbel_argmax(logits, noise)
        return index + self._first if self._first else index


def _buffer(*shape: int) -> tuple[Tensor, Array]:
    tensor = torch.empty(shape, dtype=torch.float32, device="cpu")
    return tensor, tensor.numpy()

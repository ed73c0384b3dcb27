"""Stacks of Linear layers and activations in fewer and cheaper calls, on a CPU. A candidate of `compiled.py`.

For 64 rows, a policy of two layers of 64 spends more time in torch's dispatch, its allocations and its tanh than in its
products. A stack calls the same BLAS routine into buffers of its own and takes numpy's vectorized tanh, which is 10
times as fast as torch's and differs by one unit in the last place.

A built-in policy is called whole, without modules in between, and a categorical action is drawn in numpy. Environments
step between two calls and push torch's code out of the processor's caches: what a module call and an operation on few
numbers cost there is twice what a loop of calls shows (decision 0043).

# n rows, F features
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cormorant_worker.policy.exploration import is_greedy
from cormorant_worker.policy.loading import Acting
from cormorant_worker.policy.networks import ActionHeads, CategoricalHead, Perceptron, gumbel_argmax
from cormorant_worker.policy.zoo import Policy
from cormorant_worker.spaces import Array

_Layer = tuple[nn.Linear, type[nn.Module] | None]
"""A linear layer and the activation after it."""


class DenseStack:
    """Linear layers with tanh, ReLU or nothing after each, for observations `[n, F]` float32.

    Reads the layers' own memory: weights that are copied into them act at the next call.
    """

    def __init__(self, layers: Sequence[_Layer], eager: Callable[[Tensor], Tensor]) -> None:
        self._eager = eager
        self._layers = [
            (None if layer.bias is None else layer.bias.detach(), layer.weight.detach().t(), activation)
            for layer, activation in layers
        ]
        self._rows = -1
        self._buffers: list[tuple[Tensor, Array]] = []
        """[rows, width] behind each layer, and the same memory as an array."""

    def __call__(self, x: Tensor) -> Tensor:
        """What the layers give, `[n, width]` in new memory: the caller may keep it, as an action that environments read
        while they step. With a gradient, under autocast, or for another dtype or shape, the layers are asked.
        """
        if not self.takes(x):
            return self._eager(x)
        x = self._apply(x, len(self._layers) - 1)
        bias, weight, activation = self._layers[-1]
        return _activated(activation, _linear(x, bias, weight, None))

    def takes(self, x: Tensor) -> bool:
        """False where the layers have to be asked."""
        is_changed = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        return x.dtype == torch.float32 and x.dim() == 2 and not is_changed

    def overwrite(self, x: Tensor) -> Array:
        """What the layers give, `[n, width]` in memory that the next call overwrites. `x`: one that `takes` allows."""
        self._apply(x, len(self._layers))
        return self._buffers[-1][1]

    def _apply(self, x: Tensor, count: int) -> Tensor:
        if x.shape[0] != self._rows:
            self._rows = x.shape[0]
            self._buffers = [_buffer(self._rows, weight.shape[1]) for _, weight, _ in self._layers]
        for i in range(count):
            bias, weight, activation = self._layers[i]
            out, array = self._buffers[i]
            x = _activated(activation, _linear(x, bias, weight, out), array)
        return x


def _buffer(*shape: int) -> tuple[Tensor, Array]:
    """A tensor and its memory as an array."""
    tensor = torch.empty(shape, dtype=torch.float32, device="cpu")
    return tensor, tensor.numpy()


def _linear(x: Tensor, bias: Tensor | None, weight: Tensor, out: Tensor | None) -> Tensor:
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


def _activated(activation: type[nn.Module] | None, x: Tensor, array: Array | None = None) -> Tensor:
    """`x`, changed in place. `array`: its memory, if the caller has it as an array."""
    if activation is nn.Tanh:
        array = x.numpy() if array is None else array
        np.tanh(array, out=array)
    elif activation is nn.ReLU:
        torch.relu_(x)
    return x


class DenseCategorical:
    """A built-in policy of dense layers that draws one categorical action and writes nothing else."""

    def __init__(self, policy: Policy, head: CategoricalHead, stack: DenseStack) -> None:
        self._policy = policy
        self._encode = policy.encoder.forward
        self._stack = stack
        self._first = head.first
        self._noise = _buffer(0, head.num_params)

    def __call__(self, observation: Any) -> Any:
        """Actions `[n]` int64, from the same random numbers as the policy's."""
        features = self._encode(observation)
        if not self._stack.takes(features):
            return self._policy(observation)
        logits = self._stack.overwrite(features)
        if is_greedy():
            index: Array = logits.argmax(-1)
        else:
            if len(self._noise[0]) != len(logits):
                self._noise = _buffer(*logits.shape)
            tensor, noise = self._noise
            tensor.exponential_()
            index = gumbel_argmax(logits, noise)
        return index + self._first if self._first else index


def with_stacks(acting: nn.Module) -> Acting | None:
    """A call of `acting` in which stacks take the place of the layers' own calls; None: it has no such layers.

    The modules are changed only during a call: a caller that copies or trains them finds them unchanged.
    """
    if type(acting) is Policy and (whole := _categorical(acting)) is not None:
        return whole
    patches = [(module.__dict__, name, call) for module, name, call in _patches(acting)]
    if not patches:
        return None

    def call(observation: Any) -> Any:
        for attributes, name, stack in patches:
            attributes[name] = stack
        try:
            return acting(observation)
        finally:
            for attributes, name, _ in patches:
                del attributes[name]

    return call


def _categorical(policy: Policy) -> DenseCategorical | None:
    if type(policy.heads) is not ActionHeads or policy.returns_log_prob:
        return None
    head, layers = policy.heads.only, _layers([policy.body, policy.heads.linear])
    if type(head) is not CategoricalHead or not layers:
        return None
    if any(_is_changed(module) for module in (policy, policy.encoder, policy.heads)):
        return None
    return DenseCategorical(policy, head, DenseStack(layers, policy.forward))


def _patches(module: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[..., Tensor]]]:
    """(module, method, what to call instead) of the outermost stacks."""
    if type(module) is Policy:
        layers = _layers([module.body, module.heads.linear])
        if layers and not _is_changed(module) and not _is_changed(module.heads):
            yield module, "params", _params_of(module, layers)
            return
    if isinstance(module, nn.Sequential):
        layers = _layers([module])
        if layers:
            yield module, "forward", DenseStack(layers, module.forward)
            return
    for child in module.children():
        yield from _patches(child)


def _params_of(policy: Policy, layers: Sequence[_Layer]) -> Callable[[Any], Tensor]:
    heads, encode = policy.heads, policy.encoder.forward

    def eager(features: Tensor) -> Tensor:
        return nn.functional.linear(policy.body.forward(features), heads.linear.weight, heads.linear.bias)

    stack = DenseStack(layers, eager)
    if heads.log_std is None:
        return lambda observation: stack(encode(observation))
    return lambda observation: heads.arrange(stack(encode(observation)))


def _layers(modules: Sequence[nn.Module]) -> list[_Layer]:
    """The layers of modules that follow each other; empty: something in them is no plain layer on a CPU."""
    found: list[_Layer] = []
    for module in _flat(modules):
        if isinstance(module, nn.Module) and _is_changed(module):
            return []
        if type(module) is nn.Linear:
            if module.weight.dtype != torch.float32 or module.weight.device.type != "cpu":
                return []
            found.append((module, None))
        elif module in (nn.Tanh, nn.ReLU) or type(module) in (nn.Tanh, nn.ReLU):
            if not found or found[-1][1] is not None:
                return []
            found[-1] = (found[-1][0], module if isinstance(module, type) else type(module))
        elif type(module) is not nn.Identity:
            return []
    return found


def _flat(modules: Sequence[nn.Module]) -> Iterator[Any]:
    for module in modules:
        if isinstance(module, nn.Module) and _is_changed(module):
            yield module
        elif type(module) is nn.Sequential:
            yield from _flat(list(module))
        elif type(module) is Perceptron:
            for layer in module.layers:
                yield layer
                yield module.activation
        else:
            yield module


def _is_changed(module: nn.Module) -> bool:
    """It does not just what its class does."""
    replaced = any(name in module.__dict__ for name in ("forward", "params", "act"))
    return bool(module._forward_hooks or module._forward_pre_hooks or replaced)

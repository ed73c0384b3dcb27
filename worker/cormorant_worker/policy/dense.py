"""Stacks of Linear layers and activations in fewer and cheaper calls, on a CPU. A candidate of `compiled.py`.

For 64 rows, a policy of two layers of 64 spends more time in torch's dispatch, its allocations and its tanh than in its
products. A stack calls the same BLAS routine into buffers of its own and takes numpy's vectorised tanh, which is 10
times as fast as torch's and differs by one unit in the last place; with ReLU the result is equal bit by bit.

# n rows, F features
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cormorant_worker.policy.loading import Acting
from cormorant_worker.policy.networks import Perceptron
from cormorant_worker.policy.zoo import Policy

_Layer = tuple[nn.Linear, type[nn.Module] | None]
"""A linear layer and the activation after it."""


class DenseStack:
    """Linear layers with tanh, ReLU or nothing after each: `[n, F]` float32 -> a new tensor `[n, width]`.

    Reads the layers' own memory: weights that are copied into them act at the next call.
    """

    def __init__(self, layers: Sequence[_Layer], eager: Callable[[Tensor], Tensor]) -> None:
        self._eager = eager
        self._layers = [
            (None if layer.bias is None else layer.bias.detach(), layer.weight.detach().t(), activation)
            for layer, activation in layers
        ]
        self._rows = -1
        self._buffers: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        """What the layers give, without gradient; with one, under autocast, or for another dtype or shape, they are
        asked.
        """
        if x.dtype != torch.float32 or x.dim() != 2 or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return self._eager(x)
        if x.shape[0] != self._rows:
            self._allocate(x.shape[0])
        for (bias, weight, activation), out in zip(self._layers, self._buffers, strict=False):
            x = _apply(x, bias, weight, activation, out)
        bias, weight, activation = self._layers[-1]
        # New memory each time: the caller may keep it, as an action that environments read while they step.
        return _apply(x, bias, weight, activation, None)

    def _allocate(self, rows: int) -> None:
        self._rows = rows
        # Plain memory: what is allocated in inference mode can be written in inference mode only.
        with torch.inference_mode(False):
            self._buffers = [torch.empty(rows, weight.shape[1]) for _, weight, _ in self._layers[:-1]]


def _apply(x: Tensor, bias: Tensor | None, weight: Tensor, activation: Any, out: Tensor | None) -> Tensor:
    y = torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)
    if activation is nn.Tanh:
        array = y.numpy()
        np.tanh(array, out=array)
    elif activation is nn.ReLU:
        torch.relu_(y)
    return y


def with_stacks(acting: Acting, modules: Sequence[nn.Module]) -> Acting | None:
    """A call of `acting` in which stacks take the place of the layers' own calls; None: it has no such layers.

    The modules are changed only during a call: a caller that copies or trains them finds them unchanged.
    """
    patches = [(module.__dict__, name, call) for root in modules for module, name, call in _patches(root)]
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


def _patches(module: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[..., Tensor]]]:
    """(module, method, what to call instead) of the outermost stacks."""
    if type(module) is Policy:
        layers = _layers([module.body, module.heads.linear])
        if layers:
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
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)

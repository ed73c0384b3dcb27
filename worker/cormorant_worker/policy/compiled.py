"""`spec.policy.compile`: tries faster ways to call a policy when a worker starts, and uses the first correct one.

    off    the policy as it is
    auto   layers: the built-in mlp without its modules (`DenseCategorical`), on a CPU; milliseconds
    on     then torch.compile, with CUDA graphs on a device; up to a minute, and needs a C++ compiler

Otherwise a policy whose environments are on its CUDA device is recorded with what it writes (collect/rollout.py).

A candidate is correct if, from the same random state, it draws as many random numbers, returns the same actions
(integers exactly), and its other outputs differ by at most 1e-5. If none is correct, the policy is called unchanged,
and the log says why. Random streams are left as they were. The choice does not depend on timing, so a fixed seed
reproduces a run.

# n rows, F features, A actions
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import structlog
import torch
from torch import Tensor, nn

from cormorant_worker.policy.actor import Acting, PolicyActor, PolicyModels, samples
from cormorant_worker.policy.exploration import ExplorationType, exploring, is_greedy
from cormorant_worker.policy.networks import ActionHeads, CategoricalHead, Perceptron, gumbel_argmax
from cormorant_worker.policy.zoo import Policy
from cormorant_worker.spaces import Array, Arrays, Space, leaf_spaces

log = structlog.get_logger()

Mode = Literal["off", "auto", "on"]
Dtype = Literal["float32", "bfloat16"]

TOLERANCE = 1e-5
_CHECKS = 4


def in_dtype(models: PolicyModels, dtype: Dtype, device: torch.device) -> PolicyModels:
    """The policy with its layers in another dtype: under `torch.autocast`, which leaves the weights in float32."""
    if dtype == "float32":
        return models
    autocast = torch.autocast(device.type, torch.bfloat16)
    acting: Any = models.acting
    if hasattr(acting, "in_keys"):
        acting.forward = partial(_within, autocast, acting.forward)  # what calls it has to see a TensorDictModule
        return models
    # Unlike a decorated function, a copy of a policy that has a partial one calls the copy.
    return replace(models, acting=partial(_within, autocast, acting.__call__))


def _within(context: torch.autocast, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context:
        return call(*args, **kwargs)


def compile_actor(actor: PolicyActor, space: Space, *, mode: Mode, num_rows: int, exploration: ExplorationType) -> str:
    """Replace an actor's policy call by the first correct candidate. Returns its name, "eager" if none is.
    `num_rows`: observations in one call, as the environments will request.
    """
    began = time.perf_counter()
    eager, chosen = actor.models.acting, "eager"
    obs = [_observations(space, num_rows, seed) for seed in range(_CHECKS)]
    with _undisturbed(actor), torch.no_grad(), exploring(exploration):
        expected = _outcomes(actor, obs)
        for name, make in _candidates(actor, mode, num_rows):
            try:
                actor.models = replace(actor.models, acting=make())
                reason = _difference(expected, _outcomes(actor, obs))
            except Exception as error:  # noqa: BLE001  # a compiler's or the user's own: the policy acts as it is
                reason = f"it raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if not reason:
                chosen = name
                break
            log.warning("policy_not_compiled", candidate=name, reason=reason)
            actor.models = replace(actor.models, acting=eager)
    actor.is_recorded = chosen != "torch.compile"  # which has graphs of its own
    seconds = time.perf_counter() - began
    log.info("policy_compiled", chosen=chosen, num_rows=num_rows, startup_seconds=round(seconds, 2))
    return chosen


def _candidates(actor: PolicyActor, mode: Mode, num_rows: int) -> Iterator[tuple[str, Callable[[], Acting]]]:
    acting = actor.models.acting
    if (whole := called_whole(acting)) is not None:
        yield "layers", lambda: whole
    if mode == "on":
        # Its own random numbers would be others than the policy's: torch's generators draw.
        options: dict[str, Any] = {"fallback_random": True}
        if actor.device.type == "cuda":
            options["triton.cudagraphs"] = True

        def compiled() -> Acting:
            call: Acting = torch.compile(acting, dynamic=False, options=options)
            # Other numbers of rows, as after an environment's restart, would be compiled in the middle of a batch.
            return lambda observation: (call if _rows(observation) == num_rows else acting)(observation)

        yield "torch.compile", compiled


def _rows(observation: Any) -> int:
    while isinstance(observation, Mapping | tuple | list):
        observation = next(iter(observation.values() if isinstance(observation, Mapping) else observation))
    return int(observation.shape[0])


_Outcome = tuple[list[Array], torch.Tensor]


def _difference(expected: Sequence[_Outcome], found: Sequence[_Outcome]) -> str:
    """Why a candidate is not right; empty: it is."""
    for (theirs, their_state), (ours, our_state) in zip(expected, found, strict=True):
        if not torch.equal(their_state, our_state):
            return "it draws other random numbers than the policy"
        for a, b in zip(theirs, ours, strict=True):
            tolerance = 0.0 if a.dtype.kind in "iub" else TOLERANCE
            if not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
                return f"its results differ from the policy's by up to {np.abs(a - 1.0 * b).max():.2g}"
    return ""


def _outcomes(actor: PolicyActor, obs: Sequence[Arrays]) -> list[_Outcome]:
    """Actions for each set of observations, drawn from its own random state, and the state afterwards."""
    outcomes = []
    for seed, given in enumerate(obs):
        torch.manual_seed(seed)
        states = tuple(np.repeat(value, len(given[0]), axis=0) for value in actor.initial_states)
        acted = actor.act(given, states, np.zeros(len(given[0]), dtype=np.bool_))
        arrays = (*acted.actions, *acted.outputs, *acted.states)
        is_cuda = actor.device.type == "cuda"
        state = torch.cuda.get_rng_state(actor.device) if is_cuda else torch.get_rng_state()
        outcomes.append(([array.copy() for array in arrays], state))
    return outcomes


@contextmanager
def _undisturbed(actor: PolicyActor) -> Iterator[None]:
    """Random streams, and what a policy writes into its own tensors as it acts, are as before."""
    tensors = [tensor for module in actor.models.modules.values() for tensor in module.state_dict().values()]
    before = [(tensor, tensor.clone()) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    with torch.random.fork_rng(devices=[actor.device] if actor.device.type == "cuda" else []):
        try:
            yield
        finally:
            for tensor, value in before:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _observations(space: Space, n: int, seed: int) -> Arrays:
    """[n, ...] per leaf, of the space; where it is unbounded, about 1: at huge values every network saturates."""
    random = np.random.default_rng(seed)
    drawn = []
    for part, array in zip(leaf_spaces(space), samples(space, n), strict=True):
        if isinstance(part, gymnasium.spaces.Box) and array.dtype.kind == "f":
            drawn.append(np.clip(random.standard_normal(array.shape), part.low, part.high).astype(array.dtype))
        else:
            drawn.append(array[random.permutation(n)])
    return tuple(drawn)


def called_whole(acting: object) -> "DenseCategorical | None":
    """A function that computes the policy without its modules; None: not the built-in policy, or modified."""
    if type(acting) is not Policy or type(acting.body) is not Perceptron or type(acting.heads) is not ActionHeads:
        return None
    head, layers = acting.heads.head, [*acting.body.layers, acting.heads.linear]
    for module in acting.modules():
        if module._forward_hooks or module._forward_pre_hooks or {"forward", "params", "act"} & vars(module).keys():
            return None  # it does not just what its class does
    if acting.returns_log_prob or type(head) is not CategoricalHead:
        return None
    linears = [layer for layer in layers if type(layer) is nn.Linear and layer.weight.dtype == torch.float32]
    if len(linears) < len(layers) or not linears[0].weight.is_cpu:
        return None
    return DenseCategorical(acting, head, linears, is_tanh=acting.body.activation is torch.tanh)


class DenseCategorical:
    """The built-in `mlp` with one discrete action, computed in one call on a CPU. Reads the layers' own memory: weights
    copied into them are used from the next call on.

    Environments step between two calls and push torch's code out of the processor's caches: there, a module call and a
    small operation cost twice what a loop of calls shows (decision 0043). So this calls torch's BLAS with its own
    buffers, uses numpy's vectorized tanh, which differs from torch's by one unit in the last place, and draws the
    action in numpy.
    """

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
            tensors = [torch.empty(self._rows, w, dtype=torch.float32, device="cpu") for w in (*widths, widths[-1])]
            self._buffers = [(tensor, tensor.numpy()) for tensor in tensors]
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

"""Policies of any kind as an Actor: Tianshou's, torch modules, TensorDictModules, callables.

A policy of Tianshou's is known by `map_action` and `map_action_inverse`. It is called as its own collector calls it,
`policy(Batch(obs, info), state)`, in evaluation mode and with the gradient off; what it decides is stored, and what
`map_action` makes of that is sent to the environments. Tianshou's Batch comes from the module that the
script imported.

# n rows
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import torch

from cormorant_compat.arguments import as_flag
from cormorant_worker.errors import PolicyError, PolicyMismatch
from cormorant_worker.policy import actor
from cormorant_worker.policy.action_check import ActionCheck
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Arrays, Key, Leaf, Space, leaves, put_nested, unflattener

RandomOutputs = Callable[[Arrays], Arrays]

DECIDED: Key = ("policy_action",)
"""The action of a Tianshou policy before `map_action`."""
HIDDEN = "hidden_state"
ENTRY = "policy"


def is_tianshou_policy(policy: object) -> bool:
    """True for what has Tianshou's action maps."""
    return hasattr(policy, "map_action") and hasattr(policy, "map_action_inverse")


def batch_class() -> Any:
    """Tianshou's Batch, or None where Tianshou was not imported."""
    module = sys.modules.get("tianshou.data")
    return None if module is None else module.Batch


def make_actor(
    policy: Any,
    observation: Space,
    action: Space,
    random: RandomActor,
    *,
    exploration_noise: bool,
    num_rows: int,
) -> tuple[actor.Actor, RandomOutputs | None]:
    """An actor for a policy of any kind (None: random actions), and what the policy would have written beside random
    actions; None: nothing but zeros. `exploration_noise`: a policy of Tianshou's adds its own. `num_rows`: observations
    that the policy gets at once, and is tried with.
    """
    is_noisy = as_flag(exploration_noise, "exploration_noise")
    if is_tianshou_policy(policy):
        theirs = TianshouActor(policy, observation, action, is_noisy=is_noisy, num_rows=num_rows)
        return theirs, theirs.outputs_of_random if theirs.outputs else None
    if is_noisy:
        raise PolicyError("exploration_noise is True, and only policies of Tianshou's have a noise of their own")
    if policy is None:
        return random, None
    models = actor.wrap_policy(policy, "the caller")
    return actor.PolicyActor(models, observation, action, device=actor.device_of(policy), num_rows=num_rows), None


class TianshouActor:
    """Asks a policy of Tianshou's. What it computes beside actions is found by one dry run."""

    def __init__(self, policy: Any, observation: Space, action: Space, *, is_noisy: bool, num_rows: int) -> None:
        """Take a policy of Tianshou 1 or 2."""
        self.outputs: tuple[Leaf, ...] = ()
        self.states: tuple[Leaf, ...] = ()
        self.initial_states: Arrays = ()
        self.device = torch.device("cpu")
        self._policy = policy
        self._batch = batch_class()
        if self._batch is None:
            raise PolicyError(
                f"{type(policy).__name__} has Tianshou's map_action, and tianshou is not imported; install it, or give "
                "a torch module"
            )
        self._noise: Any = None
        if is_noisy:  # Tianshou 2's name, then that of Tianshou 1
            self._noise = getattr(policy, "add_exploration_noise", None) or policy.exploration_noise
        self._nest = unflattener(observation)
        self._is_box = isinstance(action, gymnasium.spaces.Box)
        self._action = leaves(action, ("action",))[0]
        self._check = ActionCheck(action)
        self._dry_run(observation, num_rows)

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> actor.Acted:
        state: Any = None
        if self.states and self.states[0].key == (HIDDEN,):
            state = self._wrap_state[0](states[0])
        elif self.states:  # as the policy gave it: a Batch of arrays
            nested: dict[str, Any] = {}
            for leaf, wrap, array in zip(self.states, self._wrap_state, states, strict=True):
                put_nested(nested, leaf.key[1:], wrap(array))
            state = self._batch(nested)
        decided, sent, result = self._ask(obs, state)
        outputs = [decided] if self._is_box else []
        outputs += [actor.as_numpy(value) for _, value in _flat(result.get(ENTRY, None), (ENTRY,))]
        following = [actor.as_numpy(value) for _, value in _flat(result.get("state", None), (HIDDEN,))]
        if len(outputs) != len(self.outputs) or len(following) != len(self.states):
            raise PolicyMismatch(
                f"{type(self._policy).__name__} gave {len(outputs)} outputs and {len(following)} states, before "
                f"{len(self.outputs)} and {len(self.states)}; it must give the same at every step"
            )
        return actor.Acted((sent,), tuple(outputs), tuple(following))

    def outputs_of_random(self, actions: Arrays) -> Arrays:
        """The policy's raw output for random actions, by the inverse of its action map."""
        if self.outputs[0].key != DECIDED:
            return ()
        decided = self._policy.map_action_inverse(actions[0].copy())
        return (np.asarray(decided, dtype=self.outputs[0].dtype),)

    def _ask(self, obs: Arrays, state: Any) -> tuple[Array, Array, Any]:
        nested = self._nest(obs)
        batch = self._batch(obs=self._batch(nested) if isinstance(nested, dict) else nested, info=self._batch())
        result = self._policy(batch, state)
        decided = actor.as_numpy(result.act)
        if self._noise is not None:
            decided = actor.as_numpy(self._noise(decided, batch))
        sent = np.asarray(self._policy.map_action(decided))
        return decided, sent if sent.dtype == self._action.dtype else actor.cast_to(self._action, sent), result

    def _dry_run(self, observation: Space, n: int) -> None:
        obs = actor.samples(observation, n)
        before = tuple(array.copy() for array in obs)
        try:
            with torch.no_grad(), evaluating(self._policy):
                decided, sent, result = self._ask(obs, None)
        except Exception as error:  # the user's own code: whatever it raises is reported as its failure
            raise PolicyError(
                f"{type(self._policy).__name__} raised {type(error).__name__} on observations of shape "
                f"{[a.shape for a in obs]}: {error}"
            ) from error
        actor.refuse_changed(obs, before)
        self._check.fit((sent,), n)
        outputs = [(DECIDED, decided)] if self._is_box else []
        outputs += list(_flat(result.get(ENTRY, None), (ENTRY,)))
        self.outputs = tuple(actor.output_leaf(key, value, n) for key, value in outputs)
        state = list(_flat(result.get("state", None), (HIDDEN,)))
        self.states = tuple(actor.output_leaf(key, value, n) for key, value in state)
        # A state of None, which an episode begins with, stands for zeros: rows beside one that goes on cannot be None.
        self.initial_states = tuple(np.zeros((1, *leaf.shape), leaf.dtype) for leaf in self.states)
        self._wrap_state = [torch.from_numpy if isinstance(value, torch.Tensor) else np.asarray for _, value in state]


@contextmanager
def evaluating(policy: Any) -> Iterator[None]:
    """Put a policy's modules into evaluation mode for a while, as Tianshou's collector does."""
    given = policy.values() if isinstance(policy, Mapping) else [policy]
    modules = [one for one in given if isinstance(one, torch.nn.Module)]
    modes = [(module, module.training) for one in modules for module in one.modules()]
    for one in modules:
        one.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _flat(value: Any, prefix: Key) -> list[tuple[Key, Any]]:
    if value is None:
        return []
    if isinstance(value, torch.Tensor | np.ndarray):
        return [(prefix, value)]
    listed = getattr(value, "get_keys", None) or getattr(value, "keys", None)
    if listed is None:
        raise PolicyMismatch(
            f"the policy's {'.'.join(prefix)} is {type(value).__name__}; give a tensor, an array or a Batch of them"
        )
    return [item for name in listed() for item in _flat(value[name], (*prefix, str(name)))]

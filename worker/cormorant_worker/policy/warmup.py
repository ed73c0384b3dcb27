"""Warm-up: random actions in batches that also have the policy's other outputs."""

import numpy as np

from cormorant_worker.policy.actor import Acted, Actor
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Arrays


class WarmupActor:
    """Draws actions at random; the policy's other outputs are zero, its recurrent states stay at the first value.

    The policy then takes over from its initial states, wherever in an episode that is.
    """

    def __init__(self, random: RandomActor, policy: Actor) -> None:
        self.outputs = policy.outputs
        self.states = policy.states
        self.initial_states = policy.initial_states
        self.device = policy.device
        self._random = random

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        n = len(is_init)
        return Acted(
            self._random.act(obs, states, is_init).actions,
            tuple(np.zeros((n, *leaf.shape), leaf.dtype) for leaf in self.outputs),
            tuple(np.repeat(value, n, axis=0) for value in self.initial_states),
        )

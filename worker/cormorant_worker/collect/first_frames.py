"""The first frames of a collector: drawn at random, exactly as many as the manifest says.

# n rows (environments that act now)
"""

from collections.abc import Callable

import numpy as np

from cormorant_worker.policy.actor import Acted, Actor
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Arrays
from cormorant_worker.weights.staged import RANDOM_VERSION, StagedWeights


class FirstFrames:
    """Draws for as many frames as are left, and asks the policy for the other rows of the last vector step.

    What the policy computes beside the action is zero in drawn rows, and its recurrent states stay at their first
    value: it takes over from there, wherever in an episode that is.
    """

    def __init__(
        self,
        random: RandomActor,
        policy: Actor,
        weights: StagedWeights,
        left: int,
        outputs_of: Callable[[Arrays], Arrays] | None,
    ) -> None:
        """`outputs_of`: what the policy would have computed beside drawn actions; may leave out the last outputs."""
        self.outputs, self.states, self.initial_states = policy.outputs, policy.states, policy.initial_states
        self.device = policy.device
        self.left = left
        self._random = random
        self._policy = policy
        self._weights = weights
        self._outputs_of = outputs_of

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        n, actions = len(is_init), self._random.act(obs, states, is_init).actions
        known = () if self._outputs_of is None else self._outputs_of(actions)
        zeros = (np.zeros((n, *leaf.shape), leaf.dtype) for leaf in self.outputs[len(known) :])
        drawn = Acted(actions, (*known, *zeros), tuple(np.repeat(value, n, axis=0) for value in self.initial_states))
        num_drawn, self.left = min(self.left, n), max(0, self.left - n)
        if num_drawn == n:
            return drawn
        # With all rows: some policies know how many environments there are.
        acted = self._policy.act(obs, states, is_init)
        versions = np.full(n, self._weights.version)
        versions[:num_drawn] = RANDOM_VERSION

        def join(first: Arrays, others: Arrays) -> Arrays:
            return tuple(np.concatenate([a[:num_drawn], b[num_drawn:]]) for a, b in zip(first, others, strict=True))

        return Acted(
            join(drawn.actions, acted.actions),
            join(drawn.outputs, acted.outputs),
            join(drawn.states, acted.states),
            versions,
        )

"""TorchRL's chain of seeds, so that a script that seeds several things in turn goes on as it did."""

import numpy as np

_MODULUS = (1 << 32) - 1


def next_seed(seed: int, links: int) -> int:
    """What TorchRL's `set_seed` returns after `links` environments: 0 gives 795726461, 2841183792, 2309840538."""
    for _ in range(links):
        seed = int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % _MODULUS
    return seed

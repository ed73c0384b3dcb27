"""What `collect` is asked for, checked before anything is stepped."""

import math


def check_request(n_step: int | None, n_episode: int | None, *, render: float | None, is_closed: bool) -> None:
    """Refuse what cannot be collected.

    Raises:
        ValueError: both or neither of n_step and n_episode, numbers that are none or out of range, a negative time to
            sleep, or a closed collector.
    """
    if is_closed:
        raise ValueError("the collector is closed; make another one")
    if (n_step is None) == (n_episode is None):
        raise ValueError(f"n_step {n_step} and n_episode {n_episode}: give exactly one of them, 1 or more")
    name, number = ("n_step", n_step) if n_episode is None else ("n_episode", n_episode)
    if isinstance(number, bool) or not hasattr(number, "__index__") or int(number) < 1:  # type: ignore[arg-type]
        raise ValueError(f"{name} {number!r} is not a number of them; give an integer of 1 or more")
    if render is not None and not (math.isfinite(render) and render >= 0):
        raise ValueError(f"render {render} is no time to sleep; give seconds, 0 or more, or None")

"""Tianshou's collectors on this engine: `docs/how-to/migrating-from-tianshou.md` has the table of all arguments."""

from cormorant_contract.errors import needs

with needs("worker"):
    from cormorant_compat.tianshou import *  # noqa: F403
    from cormorant_compat.tianshou import __all__ as __all__

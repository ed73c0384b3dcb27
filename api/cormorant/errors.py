"""All deliberate exceptions: `CormorantError` and its subclasses in collectors, `ClientError` and its subclasses in
clients of a head. Every message says what happened, the values, and what to do.
"""

from cormorant_contract.errors import needs

with needs("client"):
    from cormorant_client.errors import *  # noqa: F403
    from cormorant_worker.errors import *  # noqa: F403
    from cormorant_worker.errors import CormorantError

__all__ = [name for name, kind in vars().items() if isinstance(kind, type) and issubclass(kind, CormorantError)]

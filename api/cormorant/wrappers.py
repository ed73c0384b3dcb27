"""Wrappers of gymnasium environments, for `spec.env.gymnasium.wrappers`."""

from cormorant_contract.errors import needs

with needs("worker"):
    from cormorant_worker.action_mask import ObservedActionMask

__all__ = ["ObservedActionMask"]

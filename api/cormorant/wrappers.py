"""Wrappers of gymnasium environments, for `spec.env.gymnasium.wrappers`."""

from cormorant_worker.action_mask import ObservedActionMask

__all__ = ["ObservedActionMask"]

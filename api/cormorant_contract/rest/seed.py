"""`/v1/seed`: every worker begins anew."""

from cormorant_contract.rest.base import Answer, Count, Request


class Reseed(Request):
    """Ask for other streams."""

    seed: Count
    """Takes the place of `spec.collection.seed` for as long as this head runs."""


class Seeded(Answer):
    """Who has begun anew."""

    seed: Count
    workers: tuple[str, ...]
    """`<group>-<index>`. Workers that are replaced later begin with this seed, too."""

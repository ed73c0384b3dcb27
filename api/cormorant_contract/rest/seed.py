"""`/v1/seed`: restart every worker's environments and random streams."""

from cormorant_contract.rest.base import Answer, Count, RequestBody


class Reseed(RequestBody):
    """Reseed the fleet."""

    seed: Count
    """Replaces `spec.collection.seed` until this head ends."""


class Seeded(Answer):
    """The workers that were reseeded."""

    seed: Count
    workers: tuple[str, ...]
    """`<group>-<index>`. Later replacements of workers also use this seed."""

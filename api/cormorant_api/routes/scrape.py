"""The metrics of one scrape. Blocks a few milliseconds, so it is called in threads."""

from contextlib import suppress

from cormorant_api.head import Head
from cormorant_api.status import phase_of
from cormorant_worker.errors import CormorantError


def scrape(head: Head, accept: str = "") -> tuple[bytes, str]:
    """The head's metrics and their content type; while the head closes, the last known values."""
    with suppress(CormorantError):  # the fleet is closing or has failed: the last values stay
        _refresh(head)
    return head.metrics.exposition.text(accept)


def _refresh(head: Head) -> None:
    metrics = head.metrics
    if not head.is_running:
        metrics.show_state("failed" if head.failure else "starting")
        return
    running = head.running
    if head.is_closing:
        metrics.show_state("failed" if head.failure else "draining")
        return
    stats = running.fleet.stats(workers=False)
    head.sample(stats)
    metrics.frames_per_second.set(round(head.rates.rate(), 1))
    metrics.show_state(phase_of(head, running, stats).lower())
    consumers = running.ledger.consumers()
    metrics.show_ledger(
        running.ledger.counts(), {name: record.last_seen.timestamp() for name, (record, _) in consumers.items()}
    )
    newest = running.updates.glance(stats.version)
    is_applying = newest is not None and newest.state in ("staged", "applying", "partially_applied")
    metrics.show_control(leases=len(head.leases.held()), is_applying=is_applying)

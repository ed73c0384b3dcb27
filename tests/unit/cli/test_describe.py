"""`cormorant describe` on what the API server says."""

from datetime import UTC, datetime
from typing import Any

import pytest

from cormorant_cli.commands.describe import Picture, lines_of


@pytest.mark.parametrize(
    ("collection", "line"),
    [
        ({"totalFrames": 600}, "  frames    150 of 600 (25%), 0/s"),
        ({"episodes": {"count": 300}}, "  episodes  150 of 600 (25%), 0/s"),
    ],
)
def test_progress_is_in_frames_or_in_episodes(collection: dict[str, Any], line: str) -> None:
    job = {
        "metadata": {"name": "pong", "namespace": "a", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"env": {"envpool": {"taskId": "Pong-v5"}}, "collection": collection},
        "status": {"phase": "Running", "frames": {"collected": 150, "target": 600}},
    }
    assert line in lines_of(Picture(job=job, pods=(), events=(), now=datetime(2026, 1, 2, tzinfo=UTC)))

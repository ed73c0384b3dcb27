"""Manifests for `cormorant`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cormorant_testing.commands import Written
from manifest_making import collector_job


@pytest.fixture
def write(tmp_path: Path) -> Written:
    """Write `job.yaml`: random actions in four CartPoles without an end, but for what is given."""

    def to_file(**spec: Any) -> Path:
        document = collector_job(
            "small",
            {
                "env": {"envpool": {"taskId": "CartPole-v1", "numEnvs": 4, "numThreads": 1}},
                "policy": {"random": {}},
                "collection": {"framesPerBatch": 64},
                **spec,
            },
        )
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return to_file

"""Manifests for `cormorant`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cormorant_testing.commands import Written


@pytest.fixture
def write(tmp_path: Path) -> Written:
    """Write `job.yaml`: random actions in four CartPoles without an end, but for what is given."""

    def to_file(**spec: Any) -> Path:
        document = {
            "apiVersion": "cormorant.dev/v1alpha1",
            "kind": "CollectorJob",
            "metadata": {"name": "small"},
            "spec": {
                "env": {"envpool": {"taskId": "CartPole-v1", "numEnvs": 4, "numThreads": 1}},
                "policy": {"random": {}},
                "collection": {"framesPerBatch": 64},
                **spec,
            },
        }
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return to_file

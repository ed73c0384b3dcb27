"""Arguments that kill the process which builds with them are refused before they can."""

import pytest

from cormorant import make_collector
from cormorant_worker.errors import EnvBuildError
from manifest_making import collector_job


def job(kwargs: dict[str, object]) -> dict[str, object]:
    return collector_job(
        "probe",
        {
            "env": {"envpool": {"taskId": "Catch-v0", "numEnvs": 2, "kwargs": kwargs}},
            "policy": {"random": {}},
            "collection": {"framesPerBatch": 8},
        },
    )


def test_segfaulting_argument_is_refused_by_a_sentence() -> None:
    with pytest.raises(EnvBuildError, match=r"Catch-v0 with kwargs \{'height': -1\} was killed by SIGSEGV; check"):
        make_collector(job({"height": -1}))


def test_arguments_that_work_pass() -> None:
    with make_collector(job({"height": 7})) as collector:
        assert collector.collect(num_steps=9)["observation"].shape[2:] == (7, 5)

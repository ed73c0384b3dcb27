"""The chart's own test, on a cluster that runs its pod."""

import pytest

from cormorant_testing.real_cluster import Installation

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_helm_test_runs_under_the_restricted_level(installed: Installation) -> None:
    said = installed.shell("helm test cormorant --namespace cormorant --timeout 3m", timeout_s=240)
    assert "Phase:          Succeeded" in said


def test_operator_image_holds_neither_torch_nor_ray(installed: Installation) -> None:
    script = "import importlib.util as u; print([n for n in ('torch', 'ray', 'envpool') if u.find_spec(n)])"
    assert installed.operators("exec", "deployment/cormorant", "--", "python", "-c", script).strip() == "[]"


def test_operator_image_adds_little_to_its_base(installed: Installation) -> None:
    # What the Dockerfile copies into it lies below /opt.
    used_mb = int(installed.operators("exec", "deployment/cormorant", "--", "du", "-sm", "/opt").split()[0])
    assert 0 < used_mb < 150

"""The chart's own test, on a cluster that runs its pod."""

from cormorant_testing.real_cluster import DISK_USAGE, Installation
from cormorant_testing.real_job import note


def test_helm_test_runs_under_the_restricted_level(installed: Installation) -> None:
    said = installed.shell("helm test cormorant --namespace cormorant --timeout 3m", timeout_s=240)
    assert "Phase:          Succeeded" in said


def test_operator_image_holds_neither_torch_nor_ray(installed: Installation) -> None:
    script = "import importlib.util as u; print([n for n in ('torch', 'ray', 'envpool') if u.find_spec(n)])"
    assert installed.operators("exec", "deployment/cormorant", "--", "python", "-c", script).strip() == "[]"


def test_images_are_as_small_as_promised(installed: Installation) -> None:
    used = installed.operators("exec", "deployment/cormorant", "--", "sh", "-c", DISK_USAGE)
    operator_mb = int(used.partition("MB")[0])
    note(f"operator: {operator_mb} MB; cpu: {installed.images.job_mb} MB")
    assert 0 < operator_mb <= 250
    assert 0 < installed.images.job_mb <= 1500

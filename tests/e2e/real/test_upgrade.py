"""The release: the chart's own test, its images, and pods of the last release under this operator."""

import subprocess
from pathlib import Path

from cormorant_testing.helm import CHART, Release, package
from cormorant_testing.kubectl import RESTRICTED, Namespace
from cormorant_testing.needs import lacks
from cormorant_testing.real_cluster import DISK_USAGE, ROOT, Images, Installation, adopt_crd
from cormorant_testing.real_job import Job, note, running, small_job


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


MANIFEST = small_job(
    "live",
    {"envpool": {"taskId": "CartPole-v1", "numEnvs": 8, "numThreads": 1}},
    policy="cormorant_worker.policy.zoo:mlp",
    collection={"framesPerBatch": 256, "seed": 7},
    output={"queue": {"capacityBatches": 4, "onFull": "drop_oldest"}},
)
SUBJECT = "release notes of v0.2.0"
"""Subject of the released commit. Its digest would not survive a rewrite of the history."""


def unpack_last_release(folder: Path) -> Path:
    """Its files, from this repository's history. Skips the test in a clone without history."""
    archive = folder / "release.tar"
    search = ["git", "log", "-1", "--format=%H", "--fixed-strings", f"--grep={SUBJECT}"]
    revision = subprocess.run(search, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.strip()
    if not revision:
        lacks("history", f"this clone does not have the last release, {SUBJECT!r}: git fetch --unshallow")
    subprocess.run(["git", "archive", "--output", archive, revision], cwd=ROOT, check=True, timeout=60)
    tree = folder / "release"
    tree.mkdir()
    subprocess.run(["tar", "--extract", "--file", archive, "--directory", tree], check=True, timeout=60)
    return tree


def values(images: Images, namespace: Namespace) -> list[str]:
    return [
        f"image.repository={images.operator.rpartition(':')[0]}",
        f"image.tag={images.tag}",
        f"jobs.image.repository={images.job.rpartition(':')[0]}",
        f"jobs.image.tag={images.tag}",
        f"watchNamespaces={{{namespace.name}}}",
        "resources.requests.cpu=20m",
    ]


def until_frames_go_on(job: Job) -> None:
    seen = job.frames()
    job.until(lambda: job.frames() > seen, what=f"more frames than {seen} are counted")


def test_pods_of_the_last_release_go_on_under_this_operator(installed: Installation, tmp_path: Path) -> None:
    checkout = unpack_last_release(tmp_path)
    images = installed.images.with_code_of(checkout)
    with Namespace("upgrade", RESTRICTED) as namespace:
        release = Release(namespace.name)
        release.install(*values(images, namespace), chart=package(checkout / "charts" / "cormorant", tmp_path))
        try:
            with running(namespace, MANIFEST) as job:
                job.until_ready()
                until_frames_go_on(job)
                pods = job.pods()
                release.upgrade(*values(installed.images, namespace), chart=package(CHART, tmp_path))
                namespace("rollout", "status", "deployment/cormorant", "--timeout=50s")
                until_frames_go_on(job)
                assert job.pods() == pods
                job.replace_worker()
                (replacement,) = job.pods("worker")
                assert namespace.get("pod", replacement)["spec"]["containers"][0]["image"] == images.job
                job.until_ready()
                until_frames_go_on(job)
                # The next head is of this release.
                job.kill_head()
                until_frames_go_on(job)
                note(f"deleted to nothing left: {job.delete():.1f} s")
        finally:
            release.uninstall()
            adopt_crd(namespace)

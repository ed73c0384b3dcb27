"""One release of the chart on a cluster with nodes, with images of this checkout, for all tests of this folder."""

from collections.abc import Iterator

import pytest

from cormorant_testing.helm import helm
from cormorant_testing.kubectl import RESTRICTED, Namespace
from cormorant_testing.real_cluster import RELEASE, Images, Installation, skip_without_nodes
from cormorant_testing.real_job import note

CRD = "collectorjobs.cormorant.dev"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    skip_without_nodes()
    images = Images()
    images.provide()
    with Namespace("real", RESTRICTED) as jobs:
        unpacked_s = images.unpack(jobs)
        installation = Installation(tmp_path_factory.mktemp("real"), jobs, images)
        if jobs("get", "crd", CRD, "--ignore-not-found", "-o", "name"):
            # Other tests may have left it to no release, or to theirs.
            owner = (f"meta.helm.sh/release-name={RELEASE}", f"meta.helm.sh/release-namespace={RELEASE}")
            jobs("annotate", "crd", CRD, "--overwrite", *owner)
            jobs("label", "crd", CRD, "--overwrite", "app.kubernetes.io/managed-by=Helm")
        helm("uninstall", RELEASE, "-n", RELEASE, "--ignore-not-found")
        installation.install()
        yield installation
        note(f"image unpacked and run once: {unpacked_s:.1f} s")
        note(installation.log())
        jobs("delete", "collectorjobs", "--all", "--wait=false", check=False)
        installation.release.uninstall()
        jobs.until(lambda: not jobs.items("pods"), what="pods of the tests are gone", within_s=90)

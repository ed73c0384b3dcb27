"""Which images pods run, and where the code of a user comes from."""

from typing import Any

from cormorant_operator import names
from cormorant_operator.defaults import OperatorDefaults
from cormorant_operator.names import Manifest
from cormorant_operator.render.pods import PodOrigin, head_pod, worker_pod
from cormorant_testing.operator_world import make_job

BIRTH = PodOrigin(template="abc", base_image="example/cormorant:1")


def main_container(pod: Manifest) -> dict[str, Any]:
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def test_gpu_groups_run_the_cuda_image() -> None:
    def image(*, cuda: str = "example/cormorant:1", **group: Any) -> object:
        job = make_job(workerGroups=[{"name": "g", **group}])
        origin = PodOrigin(template="abc", base_image="example/cormorant-cpu:1", cuda_image=cuda)
        pod = worker_pod(job, OperatorDefaults(), origin, group=job.spec.worker_groups[0], index=0, attempt=0)
        assert pod["metadata"]["annotations"][names.BASE_IMAGE] == "example/cormorant-cpu:1"
        return main_container(pod)["image"]

    assert image(device="gpu") == "example/cormorant:1"
    assert image() == "example/cormorant-cpu:1"
    assert image(device="gpu", cuda="") == "example/cormorant-cpu:1"
    own = {"spec": {"containers": [{"name": "worker", "image": "mine:2"}]}}
    assert image(device="gpu", template=own) == "mine:2"


def test_head_remembers_the_cuda_image_of_its_workers() -> None:
    defaults, job = OperatorDefaults(), make_job()
    origin = PodOrigin(template="abc", base_image="example/cormorant-cpu:1", cuda_image="example/cormorant:1")
    pod = head_pod(job, defaults, origin, epoch=1, floor_frames=0, config="c")
    assert main_container(pod)["image"] == "example/cormorant-cpu:1"
    assert pod["metadata"]["annotations"][names.CUDA_IMAGE] == "example/cormorant:1"
    assert (
        names.CUDA_IMAGE
        not in head_pod(job, defaults, BIRTH, epoch=1, floor_frames=0, config="c")["metadata"]["annotations"]
    )


def test_code_of_an_image_is_mounted_where_the_cluster_can() -> None:
    job = make_job(code={"image": "example/my-code:1"})
    defaults = OperatorDefaults(has_image_volumes=True, image_pull_policy="Always")
    pod = worker_pod(job, defaults, BIRTH, group=job.spec.worker_groups[0], index=0, attempt=0)
    assert pod["spec"]["volumes"][-1] == {
        "name": "code",
        "image": {"reference": "example/my-code:1", "pullPolicy": "Always"},
    }
    assert main_container(pod)["volumeMounts"][-1] == {
        "name": "code",
        "mountPath": "/etc/cormorant/code",
        "readOnly": True,
    }
    path = "/etc/cormorant/code/code:/etc/cormorant/code/code/packages.zip"
    assert {"name": "PYTHONPATH", "value": path} in main_container(pod)["env"]
    assert "initContainers" not in pod["spec"]


def test_job_without_code_keeps_the_path_of_its_image() -> None:
    job = make_job()
    for pod in (
        worker_pod(job, OperatorDefaults(), BIRTH, group=job.spec.worker_groups[0], index=0, attempt=0),
        head_pod(job, OperatorDefaults(), BIRTH, epoch=1, floor_frames=0, config="c"),
    ):
        assert "PYTHONPATH" not in {variable["name"] for variable in main_container(pod)["env"]}


def test_code_of_an_image_is_copied_where_the_cluster_has_no_image_volumes() -> None:
    job = make_job(code={"image": "example/my-code:1"})
    for pod in (
        worker_pod(job, OperatorDefaults(), BIRTH, group=job.spec.worker_groups[0], index=0, attempt=0),
        head_pod(job, OperatorDefaults(), BIRTH, epoch=1, floor_frames=0, config="c"),
    ):
        (copy,) = pod["spec"]["initContainers"]
        assert (copy["image"], copy["command"]) == ("example/my-code:1", ["cp", "-R", "/code/.", "/etc/cormorant/code"])
        assert copy["volumeMounts"] == [{"name": "code", "mountPath": "/etc/cormorant/code"}]
        ours = main_container(pod)
        assert copy["securityContext"] == ours["securityContext"]
        assert copy["resources"] == ours["resources"], "a quota counts the larger of the two"
        assert ours["volumeMounts"][-1] == {"name": "code", "mountPath": "/etc/cormorant/code", "readOnly": True}
        path = "/etc/cormorant/code:/etc/cormorant/code/packages.zip"
        assert {"name": "PYTHONPATH", "value": path} in ours["env"]
        assert pod["spec"]["volumes"][-1] == {"name": "code", "emptyDir": {"sizeLimit": "10Gi"}}

"""What is rendered: pods, their images and code, children, tokens, certificates; and what is read back."""

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from cormorant_contract.children import CODE_FOLDER, JOB_UID, RESTARTS
from cormorant_contract.parsing import parse_job
from cormorant_operator import names
from cormorant_operator.names import Manifest
from cormorant_operator.pods import NodeFact, Pod, read_node, read_pod, read_termination_message
from cormorant_operator.render import children
from cormorant_operator.render.children import token
from cormorant_operator.render.pods import GCS_PORT, WORKER_PORT, PodOrigin, head_pod, merge, worker_pod
from cormorant_operator.settings import OperatorDefaults
from cormorant_operator.workload import Placement
from cormorant_testing.operator_world import World, make_job

BIRTH = PodOrigin(base_image="example/cormorant:1", failures=2, restarts=5)
DEFAULTS = OperatorDefaults()
ISSUER = {"certManager": {"issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}}


def worker(
    *,
    index: int = 0,
    defaults: OperatorDefaults = DEFAULTS,
    origin: PodOrigin = BIRTH,
    spec: dict[str, Any] | None = None,
    **group: Any,
) -> Manifest:
    job = make_job(workerGroups=[{"name": "cpu", **group}], **(spec or {}))
    return worker_pod(job, defaults, origin, group=job.spec.worker_groups[0], index=index, attempt=1)


def head(*, defaults: OperatorDefaults = DEFAULTS, origin: PodOrigin = BIRTH, **spec: Any) -> Manifest:
    return head_pod(make_job(**spec), defaults, origin, epoch=3, floor_frames=77)


def both(*, defaults: OperatorDefaults = DEFAULTS, **spec: Any) -> tuple[Manifest, Manifest]:
    return head(defaults=defaults, **spec), worker(defaults=defaults, spec=spec)


def main_container(pod: Manifest) -> dict[str, Any]:
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def mounts(pod: Manifest) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in main_container(pod)["volumeMounts"]}


@pytest.mark.parametrize("has_fixed_user", [True, False])
def test_pods_satisfy_the_restricted_level(has_fixed_user: bool) -> None:
    for pod in both(defaults=OperatorDefaults(has_fixed_user=has_fixed_user)):
        spec, container = pod["spec"], main_container(pod)
        assert spec["securityContext"]["runAsNonRoot"]
        ids = spec["securityContext"].keys() & {"runAsUser", "runAsGroup", "fsGroup"}
        assert len(ids) == (3 if has_fixed_user else 0)
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["automountServiceAccountToken"] is False
        assert spec["restartPolicy"] == "Never"
        assert {t["tolerationSeconds"] for t in spec["tolerations"]} == {30}
        assert {"/tmp", "/dev/shm"} <= mounts(pod).keys()


@pytest.mark.parametrize("pod", [head(), worker()], ids=["head", "worker"])
def test_pods_know_whose_they_are_and_say_where_they_are_scraped(pod: Manifest) -> None:
    env = {item["name"]: item for item in main_container(pod)["env"]}
    assert env["CORMORANT_JOB"]["value"] == make_job().name
    assert env["POD_IP"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    # With a cache prefix Python looks for bytecode there alone, and not where the image brings it.
    assert "PYTHONPYCACHEPREFIX" not in env
    told = {key: value for key, value in pod["metadata"]["annotations"].items() if key.startswith("prometheus.io/")}
    assert told == {"prometheus.io/scrape": "true", "prometheus.io/port": "8000", "prometheus.io/path": "/metrics"}
    assert "8000" in {str(port["containerPort"]) for port in main_container(pod)["ports"]}


def test_an_openenv_server_is_a_sidecar_of_workers_alone() -> None:
    without, pod = both(env={"openenv": {"image": "grid:1", "port": 9000, "numEnvs": 8}})
    (server,) = pod["spec"]["initContainers"]
    assert (server["name"], server["image"], server["restartPolicy"]) == ("openenv", "grid:1", "Always")
    assert server["startupProbe"]["httpGet"] == {"path": "/health", "port": 9000}
    env = {item["name"]: item.get("value") for item in main_container(pod)["env"]}
    assert env["CORMORANT_OPENENV_URL"] == "http://127.0.0.1:9000"
    assert main_container(pod)["ports"] == [{"name": "metrics", "containerPort": 8000}]
    assert "initContainers" not in without["spec"]
    # A server that takes the worker's own port.
    pod = worker(spec={"env": {"openenv": {"image": "grid:1", "numEnvs": 8}}})
    ours = main_container(pod)
    assert {"name": "CORMORANT_PROBE_PORT", "value": "8001"} in ours["env"]
    assert ours["ports"] == [{"name": "metrics", "containerPort": 8001}]
    assert {ours[kind]["httpGet"]["port"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")} == {8001}
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == "8001"


@pytest.mark.parametrize(("given", "told"), [(300, 300), (0, 0), ("soon", 60), (True, 60), (-5, 60)])
def test_grace_of_a_template_is_what_the_processes_are_told(given: object, told: int) -> None:
    template = {"spec": {"terminationGracePeriodSeconds": given}}
    pod = worker(template=template)
    env = {item["name"]: item.get("value") for item in main_container(pod)["env"]}
    assert env["CORMORANT_GRACE_SECONDS"] == str(told)
    assert env["CORMORANT_LAST_WORDS"] == "/dev/termination-log"
    # What is no time goes to the API server, which refuses it.
    assert pod["spec"].get("terminationGracePeriodSeconds") == given
    command = main_container(head(head={"template": template}))["command"]
    assert command[command.index("--drain-seconds") + 1] == str(told // 2)


CLAIMING = {"name": "worker", "resources": {"claims": [{"name": "gpu"}]}}
CLAIMS = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
OTHERS = ("nvidia.com/mig-1g.5gb", "nvidia.com/gpu.shared", "amd.com/gpu", "gpu.intel.com/i915")


@pytest.mark.parametrize(
    ("group", "limits"),
    [
        ({"device": "cpu"}, {}),
        ({}, {"nvidia.com/gpu": 1}),
        ({"resources": {"limits": {"nvidia.com/gpu": 4}}}, {"nvidia.com/gpu": 4}),
        ({"resources": {"limits": {"memory": "1Gi"}}}, {"memory": "1Gi", "nvidia.com/gpu": 1}),
        *(({"resources": {"limits": {name: 1}}}, {name: 1}) for name in OTHERS),
        (
            {"template": {"spec": {"containers": [{"name": "worker", "resources": {"limits": {"amd.com/gpu": 1}}}]}}},
            {"amd.com/gpu": 1},
        ),
        ({"template": {"spec": {"resourceClaims": CLAIMS, "containers": [CLAIMING]}}}, {}),
        ({"resources": {"claims": [{"name": "gpu"}]}}, {}),
    ],
)
def test_gpu_group_has_a_device_and_never_a_second_one(group: dict[str, Any], limits: dict[str, Any]) -> None:
    pod = worker(**{"device": "gpu"} | group)
    assert main_container(pod)["resources"].get("limits", {}) == limits
    if "resourceClaims" in pod["spec"]:
        assert (pod["spec"]["resourceClaims"], main_container(pod)["resources"]["claims"]) == (
            CLAIMS,
            [{"name": "gpu"}],
        )
    tolerated = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert (tolerated in pod["spec"]["tolerations"]) == ("device" not in group)


def test_requests_are_filled_in_where_nothing_is_said() -> None:
    def requests(pod: Manifest) -> object:
        return main_container(pod)["resources"].get("requests")

    assert requests(head()) == {"cpu": "250m", "memory": "1Gi"}
    assert requests(worker()) == {"cpu": "100m", "memory": "512Mi"}
    # A limit alone is a request of the same size, by Kubernetes' own rule.
    assert requests(worker(resources={"limits": {"memory": "256Mi"}})) == {"cpu": "100m"}
    small = {"spec": {"containers": [{"name": "worker", "resources": {"limits": {"cpu": "50m", "memory": "64Mi"}}}]}}
    assert requests(worker(template=small)) == {}
    assert requests(worker(template={"spec": {"resources": {"requests": {"cpu": "2"}}}})) is None


def test_pods_run_on_nodes_that_can_run_the_image() -> None:
    def spec(image: str, *architectures: str) -> dict[str, Any]:
        defaults = OperatorDefaults(image="example/cormorant:1", architectures=architectures)
        return dict(worker(defaults=defaults, origin=PodOrigin(base_image=image))["spec"])

    ours, linux = "example/cormorant:1", {"kubernetes.io/os": "linux"}
    assert spec(ours)["nodeSelector"] == linux
    assert spec(ours, "amd64")["nodeSelector"] == {**linux, "kubernetes.io/arch": "amd64"}
    assert spec("example/another:1", "amd64")["nodeSelector"] == linux
    both = spec(ours, "amd64", "arm64")
    (term,) = both["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]}]
    assert both["nodeSelector"] == linux


def test_scratch_space_has_a_limit() -> None:
    volumes = {v["name"]: v for v in head()["spec"]["volumes"]}
    assert volumes["tmp"]["emptyDir"] == {"sizeLimit": "10Gi"}
    assert volumes["state"]["emptyDir"] == {"sizeLimit": "20Gi"}
    volumes = {v["name"]: v for v in head(head={"persistence": {"claimName": "ckpt"}})["spec"]["volumes"]}
    assert volumes["state"] == {"name": "state", "persistentVolumeClaim": {"claimName": "ckpt"}}
    more = {"spec": {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "50Gi"}}]}}
    volumes = {v["name"]: v for v in worker(template=more)["spec"]["volumes"]}
    assert volumes["tmp"]["emptyDir"] == {"sizeLimit": "50Gi"}


SERVICE, _ = children.services(make_job(), epoch=1)
(BUDGET,) = children.budgets(make_job(), workers=2)
POLICY = children.network_policy(make_job())


@pytest.mark.parametrize(
    ("child", "change", "is_put_right"),
    [
        (SERVICE, {"clusterIP": "10.0.0.7", "sessionAffinity": "None"}, False),
        *(
            (SERVICE, {field: None}, True)
            for field in ("selector", "ipFamilyPolicy", "publishNotReadyAddresses", "ports")
        ),
        (POLICY, {"ingress": []}, True),
        *((BUDGET, {key: None}, True) for key in ("minAvailable", "selector", "unhealthyPodEvictionPolicy")),
    ],
)
def test_child_is_compared_by_what_is_ours(child: Manifest, change: dict[str, Any], is_put_right: bool) -> None:
    assert [owner["kind"] for owner in child["metadata"]["ownerReferences"]] == ["CollectorJob"], "it goes with its job"
    assert child is not SERVICE or child["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    changed = {**child, "spec": {**child["spec"], **change}}
    assert (children.digest_of(changed) != children.digest_of(child)) == is_put_right


def test_head_understands_its_command() -> None:
    from cormorant_api.__main__ import _parser

    pod, job = head(), make_job()
    command = main_container(pod)["command"]
    assert command[:5] == ["python", "-m", "cormorant_worker.supervisor", "head", "--"]
    given = _parser().parse_args(command[command.index("cormorant_api") + 1 :])
    assert (given.epoch, given.floor_frames, given.drain_s, given.fleet) == (3, 77, 30.0, "ray")
    assert (given.ray_slot_resources, given.host) == (True, "0.0.0.0")
    assert command[command.index("--job") + 1] == "/etc/cormorant/job/job.yaml"
    assert parse_job(json.loads(children.config_map(job)["data"]["job.yaml"])).spec == job.spec
    secret = next(v for v in pod["spec"]["volumes"] if v["name"] == "tokens")["secret"]
    assert (secret["secretName"], secret["defaultMode"]) == ("pong-tokens", 0o440)


def test_what_pods_are_told_is_what_their_supervisor_understands() -> None:
    from cormorant_worker.supervisor.settings import read_worker_settings

    env = main_container(worker(index=7))["env"]
    told = {item["name"]: item.get("value", "10.0.0.7") for item in env}
    secrets = [item["valueFrom"]["secretKeyRef"]["key"] for item in env if "secretKeyRef" in item.get("valueFrom", {})]
    assert secrets == ["ray"], "no token but Ray's"
    settings = read_worker_settings(told)
    assert (settings.head, settings.slot) == (("pong-head", GCS_PORT), "cpu-7")
    assert (settings.probe_port, settings.ray.gcs_port) == (WORKER_PORT, GCS_PORT)
    assert (settings.grace_s, settings.ray.pod_ip) == (60, "10.0.0.7")
    assert main_container(worker())["command"] == ["python", "-m", "cormorant_worker.supervisor", "worker"]


def test_code_of_a_config_map_is_on_the_path() -> None:
    pod = worker(spec={"code": {"configMap": "my-policies"}})
    assert mounts(pod)[CODE_FOLDER] == "code"
    assert {"name": "code", "configMap": {"name": "my-policies"}} in pod["spec"]["volumes"]
    for pod in both():
        assert "PYTHONPATH" not in {variable["name"] for variable in main_container(pod)["env"]}


@pytest.mark.parametrize("is_mounted", [True, False])
def test_code_of_an_image_is_mounted_or_copied_where_the_cluster_cannot(is_mounted: bool) -> None:
    image, folder = "example/my-code:1", CODE_FOLDER
    for pod in both(defaults=OperatorDefaults(has_image_volumes=is_mounted), code={"image": image}):
        ours, volume = main_container(pod), pod["spec"]["volumes"][-1]
        assert ours["volumeMounts"][-1] == {"name": "code", "mountPath": folder, "readOnly": True}
        path = f"{folder}/code" if is_mounted else folder
        assert {"name": "PYTHONPATH", "value": f"{path}:{path}/packages.zip"} in ours["env"]
        if is_mounted:
            assert volume == {"name": "code", "image": {"reference": image, "pullPolicy": "IfNotPresent"}}
            assert "initContainers" not in pod["spec"]
            continue
        assert volume == {"name": "code", "emptyDir": {"sizeLimit": "10Gi"}}
        (copy,) = pod["spec"]["initContainers"]
        assert (copy["image"], copy["command"]) == (image, ["cp", "-R", "/code/.", folder])
        assert copy["volumeMounts"] == [{"name": "code", "mountPath": folder}]
        # A quota counts the larger of the two resources.
        assert [copy[key] == ours[key] for key in ("securityContext", "resources")] == [True, True]


def test_head_and_workers_have_the_credentials_of_the_dataset() -> None:
    digests = set()
    for secret in ("", "store", "other"):
        output = {"dataset": {"uri": "s3://bucket/pong", "secret": secret}}
        wanted = [{"secretRef": {"name": secret}}] if secret else None
        assert [main_container(pod).get("envFrom") for pod in both(output=output)] == [wanted, wanted]
        templates = make_job(output=output).templates
        digests.add(templates.worker(templates.spec.worker_groups[0]))
    assert len(digests) == 3


def test_head_with_a_certificate_speaks_https_alone() -> None:
    pod = head(head={"tls": {"secretName": "mine"}})
    (container,) = pod["spec"]["containers"]
    folder = "/etc/cormorant/tls"
    assert container["command"][-4:] == ["--tls-cert", f"{folder}/tls.crt", "--tls-key", f"{folder}/tls.key"]
    assert {"name": "tls", "secret": {"secretName": "mine", "defaultMode": 0o440}} in pod["spec"]["volumes"]
    assert {"name": "tls", "mountPath": folder, "readOnly": True} in container["volumeMounts"]
    probes = [container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["scheme"] for probe in probes] == ["HTTPS"] * 3
    assert pod["metadata"]["annotations"]["prometheus.io/scheme"] == "https"
    assert [seen(made).is_tls for made in (head(), pod)] == [False, True], "it is asked as it was started"


def test_certificate_is_asked_for_only_where_the_manifest_says_so() -> None:
    asked = children.certificates
    assert asked(make_job()) == asked(make_job(head={"tls": {"secretName": "mine"}})) == []
    (certificate,) = asked(make_job(head={"tls": ISSUER}))
    assert (certificate["apiVersion"], certificate["metadata"]["name"]) == ("cert-manager.io/v1", "pong-tls")
    assert certificate["spec"] == {
        "secretName": "pong-tls",
        "dnsNames": ["pong-api.team-a.svc", "pong-api.team-a.svc.cluster.local", "pong-api.team-a", "pong-api"],
        "issuerRef": {"name": "ca", "kind": "ClusterIssuer", "group": "cert-manager.io"},
        "usages": ["digital signature", "key encipherment", "server auth"],
    }
    world = World(head={"tls": ISSUER})
    world.run()
    assert world.children["Certificate", "pong-tls"] == children.digest_of(certificate)
    volumes = head(head={"tls": ISSUER})["spec"]["volumes"]
    assert {"name": "tls", "secret": {"secretName": "pong-tls", "defaultMode": 0o440}} in volumes


def test_overlay_adds_and_cannot_take_a_pod_from_its_job() -> None:
    template = {
        "metadata": {
            "labels": {"team": "a", JOB_UID: "stolen"},
            "annotations": {"prometheus.io/scrape": "false"},
        },
        "spec": {
            "restartPolicy": "Always",
            "nodeSelector": {"disk": "ssd"},
            "containers": [{"name": "worker", "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}],
        },
    }
    pod = worker(template=template)
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux", "disk": "ssd"}
    assert (pod["metadata"]["labels"]["team"], pod["metadata"]["labels"][JOB_UID]) == ("a", "0f3c9a52-uid")
    assert pod["metadata"]["annotations"]["prometheus.io/scrape"] == "false"
    env = [item["name"] for item in main_container(pod)["env"]]
    assert env[-1] == "OMP_NUM_THREADS"
    assert "CORMORANT_HEAD" in env


@pytest.mark.parametrize(
    ("base", "overlay", "merged"),
    [
        ({"a": 1, "b": {"c": 1, "d": 2}}, {"e": 2, "b": {"c": None}}, {"a": 1, "b": {"d": 2}, "e": 2}),
        ([{"name": "x", "v": 1}], [{"name": "x", "v": 2}, {"name": "y"}], [{"name": "x", "v": 2}, {"name": "y"}]),
        (
            [{"name": "v", "mountPath": "/1"}],
            [{"name": "v", "mountPath": "/2"}],
            [{"name": "v", "mountPath": "/1"}, {"name": "v", "mountPath": "/2"}],
        ),
        (["x"], ["y"], ["y"]),
        (1, {"b": 1}, {"b": 1}),
    ],
)
def test_overlays(base: Any, overlay: Any, merged: Any) -> None:
    before = json.dumps(base)
    assert merge({"a": base}, {"a": overlay}) == {"a": merged}
    assert json.dumps(base) == before


@pytest.mark.parametrize(
    "template",
    [
        {"spec": "typo"},
        {"nodeSelector": {"typo": "no spec around it"}},
        {"metadata": ["typo"]},
        {"metadata": {"annotations": "typo"}},
        {"spec": {"containers": [{"name": {"typo": 1}}]}},
        {"spec": {"initContainers": 3, "typo": 1}},
        {"spec": {"nodeSelector": ["typo"]}},
        {"spec": {"tolerations": "typo"}},
    ],
)
def test_what_is_no_template_is_left_to_the_api_server(template: dict[str, Any]) -> None:
    # Kueue may have admitted the template before.
    placement = Placement(node_selector={"pool": "a"}, tolerations=({"key": "spot"},))
    admitted = replace(BIRTH, placement=placement)
    for pod in (worker(template=template), head(origin=admitted, head={"template": template})):
        assert "typo" in json.dumps(pod)
        assert (pod["metadata"]["namespace"], pod["metadata"]["ownerReferences"][0]["controller"]) == ("team-a", True)
    assert make_job(workerGroups=[{"name": "cpu", "template": template}]).templates.quota


def test_tokens_differ_by_job_and_role_and_the_head_reads_its_own(tmp_path: Any) -> None:
    from cormorant_api.http.tokens import HeadTokens, Role

    tokens = [token(b"k" * 32, uid=uid, role=role) for uid in "aab" for role in ("read", "write", "operator", "ray")]
    assert tokens[:4] == tokens[4:8]
    assert len(set(tokens)) == 8
    secret = children.secret(make_job(), b"k" * 32)["stringData"]
    assert set(secret) == {"read", "write", "operator", "ray", "tokens.json"}
    assert len(base64.urlsafe_b64decode(secret["ray"] + "=")) == 32
    path = tmp_path / "tokens.json"
    path.write_text(secret["tokens.json"])
    path.chmod(0o440)
    given = f"Bearer {secret['operator']}"
    assert HeadTokens(path).demand(Role.OPERATOR, given, what="a drain") is Role.OPERATOR


def seen(pod: Manifest, **status: Any) -> Pod:
    """A pod as the API server shows it."""
    metadata = {**pod["metadata"], "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return read_pod({**pod, "metadata": metadata, "status": status})


def container(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state}


ENDED = {"startedAt": "2026-01-01T00:00:10Z", "finishedAt": "2026-01-01T00:01:10Z"}


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (1, "Failed")])
def test_own_container_decides_though_a_sidecar_runs_on(code: int, phase: str) -> None:
    ended = container("head", terminated={**ENDED, "exitCode": code, "message": '{"frames": 9}'})
    beside = seen(head(), phase="Running", containerStatuses=[container("istio-proxy", running={}), ended])
    assert (beside.phase, beside.exit_code, beside.has_sidecar, beside.settled_frames) == (phase, code, True, 9)
    native = seen(
        head(),
        phase="Running",
        containerStatuses=[ended],
        initContainerStatuses=[container("istio-proxy", running={})],
    )
    assert (native.phase, native.has_sidecar) == (phase, False), "its kubelet ends a native sidecar"
    alone = [container("head", running={}), container("proxy", terminated={**ENDED, "exitCode": code})]
    goes_on = seen(head(), phase="Running", containerStatuses=alone)
    assert (goes_on.phase, goes_on.has_sidecar, goes_on.is_live) == ("Running", False, True)


@pytest.mark.parametrize("reason", ["OutOfcpu", "UnexpectedAdmissionError", "NodeAffinity", "SomethingNew"])
def test_pod_that_its_kubelet_refused_did_not_fail(reason: str) -> None:
    pod = seen(worker(), phase="Failed", reason=reason, message="no healthy devices present")
    assert (pod.is_rejected, pod.is_disrupted, pod.is_failure) == (True, True, False)
    assert (pod.reason, pod.message) == (reason, "no healthy devices present")
    ended = container("worker", terminated={**ENDED, "exitCode": 1})
    ran = seen(worker(), phase="Failed", reason="Odd", containerStatuses=[ended])
    assert (ran.is_rejected, ran.is_failure) == (False, True)


def test_count_of_thousands_of_digits_is_none() -> None:
    raw = worker()
    raw["metadata"]["annotations"] |= {names.FAILURES: "9" * 5000, RESTARTS: "7"}
    pod = seen(raw, phase="Running")
    assert (pod.failures, pod.restarts) == (0, 7)


def test_long_last_words_are_read_before_they_are_cut() -> None:
    words = json.dumps({"frames": 123456, "reason": "x" * 3000 + " the end"})
    ended = container("head", terminated={"exitCode": 1, "message": words})
    pod = seen(head(), phase="Failed", containerStatuses=[ended])
    assert (pod.settled_frames, len(pod.message), pod.message[-7:]) == (123456, 1024, "the end")


@pytest.mark.parametrize(
    ("waiting", "obstacle", "words"),
    [
        ({"reason": "ImagePullBackOff"}, "ImagePull", "image x: ImagePullBackOff"),
        ({"reason": "CreateContainerConfigError", "message": "secret missing"}, "ContainerConfig", "secret missing"),
        ({}, "", ""),
        (None, "Unschedulable", "no"),
    ],
)
@pytest.mark.parametrize("reason", ["Unschedulable", "SchedulingGated", "SchedulerError"])
def test_obstacles_are_read(waiting: dict[str, str] | None, obstacle: str, words: str, reason: str) -> None:
    scheduled = {"type": "PodScheduled", "status": "True" if waiting is not None else "False"}
    conditions = [{**scheduled, "reason": reason, "message": "no"}]
    containers = [{"name": "w", "image": "x", "state": {"waiting": waiting}}]
    pod = seen(worker(), phase="Pending", conditions=conditions, containerStatuses=containers)
    assert (pod.obstacle.value, pod.obstacle_message) == (obstacle, words)


@pytest.mark.parametrize(
    ("ready", "taint", "is_lost"),
    [
        ("True", "team=b", False),
        ("False", "node.kubernetes.io/not-ready", True),
        ("Unknown", "node.kubernetes.io/unreachable", True),
        ("True", "node.kubernetes.io/out-of-service", True),
    ],
)
def test_node_is_lost_when_it_is_not_ready_or_out_of_service(ready: str, taint: str, is_lost: bool) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    raw = {
        "spec": {"taints": [{"key": taint, "effect": "NoExecute"}]},
        "status": {"conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]},
    }
    assert read_node(raw, at=at) == NodeFact(is_lost=is_lost, at=at)


@pytest.mark.parametrize(
    ("message", "frames", "words"),
    [
        ('{"frames": 7}   ', 7, ""),
        ('{"frames": true}', None, ""),
        ('{"frames": 7, "reason": "no space left"}', 7, "no space left"),
        ("a line of a log\n", None, "a line of a log"),
        ("[1]", None, "[1]"),
        ("", None, ""),
        ("[" * 4096, None, "[" * 4096),
    ],
)
def test_last_words_of_a_head(message: str, frames: int | None, words: str) -> None:
    assert read_termination_message(message) == (frames, words)

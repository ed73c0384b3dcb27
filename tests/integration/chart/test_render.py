"""What the chart renders, by Helm itself and without a cluster."""

import base64
import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

from cormorant_cli.app import crd_yaml
from cormorant_cli.commands.doctor import OPERATOR
from cormorant_contract.children import API_PORT, HEAD, JOB, api_host
from cormorant_contract.parsing import parse_job
from cormorant_operator import names
from cormorant_operator.render.pods import PodOrigin, head_pod, worker_pod
from cormorant_operator.settings import OperatorDefaults, read_settings
from cormorant_testing.helm import CHART, KUBERNETES, POD_MONITOR, Manifest, find, helm, pod_template, render, sets
from cormorant_testing.operator_world import make_job

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
VARIANTS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "namespaces": ("watchNamespaces={team-a,team-b}",),
    "replicas": ("replicas=3",),
    "shard": ("jobSelector=team notin (a\\, b)", "apiRequests.perSecond=200", "apiRequests.burst=400"),
    "network": ("networkPolicy.enabled=true",),
    "job-network": ("jobs.networkPolicy.enabled=true",),
    "names-given": ("key.existingSecret=ours", "serviceAccount.create=false", "serviceAccount.name=me"),
    "nothing-for-the-cluster": ("crd.install=false", "rbac.create=false", "rbac.userRoles=false"),
    "images": (
        "global.registry=elsewhere",  # of a parent chart
        f"image.digest={DIGEST}",
        "image.tag=ignored",
        f"jobs.image.digest={DIGEST}",
        "imagePullSecrets={mine}",
        "jobs.imagePullSecrets={theirs,more}",
    ),
    "scheduling": (
        "priorityClassName=system-cluster-critical",
        "nodeSelector.disk=ssd",
        "tolerations[0].key=spot",
        "tolerations[0].operator=Exists",
        "tolerations[0].tolerationSeconds=30",
        "topologySpread[0].topologyKey=zone",
        "topologySpread[0].whenUnsatisfiable=DoNotSchedule",
        "podLabels.team=rl",
        "podAnnotations.note=hello",
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight=1",
        "extraEnv[0].name=NO_PROXY",
        "extraEnv[0].value=10.0.0.0/8",
        "logLevel=debug",
    ),
}
EVERY = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
CLUSTER_SCOPED = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}


def kinds(manifests: list[Manifest]) -> dict[str, int]:
    found = [manifest["kind"] for manifest in manifests]
    return {kind: found.count(kind) for kind in found}


def flags(manifests: list[Manifest]) -> list[str]:
    (container,) = pod_template(manifests)["spec"]["containers"]
    return list(container["args"])


def rules(manifests: list[Manifest]) -> list[dict[str, list[str]]]:
    return [rule for m in manifests if m["kind"] in ("Role", "ClusterRole") for rule in m["rules"]]


def granted(manifests: list[Manifest], group: str) -> set[str]:
    """Resources of an API group that the operator may use."""
    return {resource for rule in rules(manifests) if group in rule["apiGroups"] for resource in rule["resources"]}


@EVERY
def test_every_object_says_what_it_is_and_where_it_belongs(values: tuple[str, ...]) -> None:
    done = helm("lint", str(CHART), "--strict", "--kube-version", KUBERNETES, *sets(values), check=False)
    assert (done.returncode, "WARNING" in done.stdout) == (0, False), done.stdout
    manifests = render(*values, apis=(POD_MONITOR,))
    identities = [(m["kind"], m["metadata"].get("namespace"), m["metadata"]["name"]) for m in manifests]
    assert len(set(identities)) == len(identities)
    for manifest in manifests:
        metadata = manifest["metadata"]
        assert manifest["apiVersion"]
        assert ("namespace" in metadata) == (manifest["kind"] not in CLUSTER_SCOPED)
        assert metadata["labels"]["app.kubernetes.io/name"] == "cormorant"
        # The operator's own watches choose by this label: nothing of the chart may carry it.
        assert metadata["labels"].get(names.MANAGED_BY) != names.MANAGER
    assert pod_template(manifests)["metadata"]["labels"].get(names.MANAGED_BY) != names.MANAGER
    # Its pods satisfy the restricted level.
    for spec in (pod_template(manifests)["spec"], find(manifests, "Pod")["spec"]):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert all(volume.keys() & {"secret", "emptyDir"} for volume in spec.get("volumes", []))
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]


def test_namespaces_mode_gives_no_right_outside_of_them() -> None:
    manifests = render("watchNamespaces={team-a,team-b}", "rbac.userRoles=false")
    assert not kinds(manifests).keys() & {"ClusterRole", "ClusterRoleBinding"}
    roles = [m for m in manifests if m["kind"] == "Role"]
    assert sorted(role["metadata"]["namespace"] for role in roles) == ["ops", "ops", "team-a", "team-b"]
    rules = [role["rules"] for role in roles if role["metadata"]["namespace"] != "ops"]
    assert rules[0] == rules[1]
    assert [flag for flag in flags(manifests) if "namespace" in flag] == ["--namespace=team-a", "--namespace=team-b"]


@EVERY
def test_no_rule_has_a_wildcard_or_reads_secrets(values: tuple[str, ...]) -> None:
    for rule in rules(render(*values)):
        words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
        assert not {"*", "pods/exec", "escalate", "bind", "impersonate"} & words
        assert "secrets" not in rule["resources"] or rule["verbs"] == ["create"]


def test_crd_is_the_generated_one_and_stays_at_uninstall() -> None:
    crd = find(render(), "CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    del crd["metadata"]["labels"]
    assert crd == yaml.safe_load(crd_yaml())
    assert "annotations" not in find(render("crd.keep=false"), "CustomResourceDefinition")["metadata"]
    assert "CustomResourceDefinition" not in kinds(render("crd.install=false"))


@EVERY
def test_operator_understands_its_arguments(values: tuple[str, ...], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    (container,) = pod_template(render(*values))["spec"]["containers"]
    settings = read_settings([flag.replace("/etc/cormorant/key/key", str(key)) for flag in container["args"]])
    assert (settings.lease, settings.probe_port) == (("ops", "cormorant"), 8080)
    assert container["command"] == ["python", "-m", "cormorant_operator"]


def test_key_is_made_long_enough_and_kept_or_given() -> None:
    manifests = render()
    secret = find(manifests, "Secret")
    assert len(base64.b64decode(secret["data"]["key"])) == 64
    assert secret["immutable"] is True
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert pod_template(manifests)["spec"]["volumes"][0]["secret"]["secretName"] == secret["metadata"]["name"]
    manifests = render("key.existingSecret=ours")
    assert "Secret" not in kinds(manifests)
    assert pod_template(manifests)["spec"]["volumes"][0]["secret"]["secretName"] == "ours"


def test_images_come_by_digest_else_by_tag_else_by_version() -> None:
    def images(*values: str) -> tuple[str, str]:
        manifests = render(*values)
        (job,) = [flag.partition("=")[2] for flag in flags(manifests) if flag.startswith("--image=")]
        return pod_template(manifests)["spec"]["containers"][0]["image"], job

    operator, job = "ghcr.io/example/cormorant-operator", "ghcr.io/example/cormorant-cpu"
    assert images() == (f"{operator}:{VERSION}", f"{job}:{VERSION}")
    assert images("image.tag=a", "jobs.image.tag=b") == (f"{operator}:a", f"{job}:b")
    assert images(*VARIANTS["images"]) == (f"{operator}@{DIGEST}", f"{job}@{DIGEST}")


def test_cuda_image_is_beside_the_cpu_image_or_named() -> None:
    def cuda(*values: str) -> list[str]:
        return [flag.partition("=")[2] for flag in flags(render(*values)) if flag.startswith("--cuda-image=")]

    assert cuda() == [f"ghcr.io/example/cormorant:{VERSION}"]
    mirror = "mirror.example/team/cormorant"
    assert cuda(f"jobs.image.repository={mirror}-cpu", "jobs.image.tag=b") == [f"{mirror}:b"]
    assert cuda(f"jobs.cudaImage.digest={DIGEST}") == [f"ghcr.io/example/cormorant@{DIGEST}"]
    assert cuda("jobs.cudaImage.repository=example/big", "jobs.cudaImage.tag=c") == ["example/big:c"]
    # One image for all pods, as before there were two.
    assert cuda("jobs.image.repository=example/mine", f"jobs.image.digest={DIGEST}") == []


def test_selectors_of_everything_are_the_deployments() -> None:
    manifests = render("replicas=2", "networkPolicy.enabled=true", apis=(POD_MONITOR,))
    deployment = find(manifests, "Deployment")
    # `cormorant doctor` selects it, too.
    assert dict(label.split("=") for label in OPERATOR.split(",")).items() <= deployment["metadata"]["labels"].items()
    wanted = deployment["spec"]["selector"]["matchLabels"]
    assert find(manifests, "Service")["spec"]["selector"] == wanted
    assert find(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == wanted
    assert find(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == wanted
    assert find(manifests, "PodMonitor", "cormorant")["spec"]["selector"]["matchLabels"] == wanted
    assert not wanted.items() <= find(manifests, "Pod")["metadata"]["labels"].items()


@pytest.mark.parametrize(("kind", "block"), [("PodMonitor", "podMonitor"), ("PrometheusRule", "prometheusRule")])
def test_objects_of_prometheus_are_for_clusters_that_know_the_kind(kind: str, block: str) -> None:
    api = (f"monitoring.coreos.com/v1/{kind}",)
    assert kind not in kinds(render()) | kinds(render(f"{block}.enabled=false", apis=api))
    made = [m for m in render(f"{block}.labels.release=prometheus", apis=api) if m["kind"] == kind]
    assert {m["metadata"]["labels"]["release"] for m in made} == {"prometheus"}
    if kind == "PrometheusRule":
        (rule,) = made
        assert rule["spec"] == yaml.safe_load((CHART / "files" / "rules" / "cormorant.yaml").read_text())


def test_operator_and_jobs_are_scraped_where_it_looks_after_them() -> None:
    def monitors(*values: str) -> tuple[Manifest, Manifest]:
        manifests = render(*values, apis=(POD_MONITOR,))
        found = [find(manifests, "PodMonitor", name)["spec"] for name in ("cormorant", "cormorant-jobs")]
        return found[0], found[1]

    def is_scraped(pod: Manifest, monitor: Manifest) -> bool:
        (container,) = pod["spec"]["containers"]
        scraped = {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
        is_chosen = monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        return is_chosen and len(scraped & {port["name"] for port in container["ports"]}) == 1

    operator, jobs = monitors()
    assert is_scraped(pod_template(render()), operator)
    job, origin = make_job(), PodOrigin(base_image="i")
    assert is_scraped(head_pod(job, OperatorDefaults(), origin, epoch=1, floor_frames=0), jobs)
    (group,) = job.spec.worker_groups
    assert is_scraped(worker_pod(job, OperatorDefaults(), origin, group=group, index=0, attempt=0), jobs)
    assert jobs["namespaceSelector"] == {"any": True}
    assert monitors("watchNamespaces={a,b}")[1]["namespaceSelector"] == {"matchNames": ["a", "b"]}
    assert kinds(render("podMonitor.jobs=false", apis=(POD_MONITOR,)))["PodMonitor"] == 1


def test_network_policy_lets_the_operator_reach_heads() -> None:
    policy = find(render("networkPolicy.enabled=true", "networkPolicy.apiServerPorts={16443}"), "NetworkPolicy")
    dns, api, heads = policy["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert [port["port"] for port in api["ports"]] == [16443]
    assert [port["port"] for port in heads["ports"]] == [API_PORT]
    (peer,) = heads["to"]
    head_labels = names.child_labels("pong", "uid", role=HEAD)
    assert peer["podSelector"]["matchLabels"].items() <= head_labels.items()


KUEUE = {"workloads", "workloads/status", "resourceflavors", "workloadpriorityclasses"}


@pytest.mark.parametrize("settings", [(), ("watchNamespaces={team-a}",)], ids=["cluster", "namespaces"])
@pytest.mark.parametrize(
    ("value", "flag", "group", "resources"),
    [
        ("jobs.networkPolicy.enabled=true", "--network-policies", "networking.k8s.io", {"networkpolicies"}),
        ("jobs.kueue=true", "", "kueue.x-k8s.io", KUEUE),
        ("jobs.tls.certManager=true", "", "cert-manager.io", {"certificates"}),
    ],
)
def test_what_is_asked_for_comes_with_its_rights(
    settings: tuple[str, ...], value: str, flag: str, group: str, resources: set[str]
) -> None:
    given, without = render(*settings, value), render(*settings)
    assert (granted(given, group), granted(without, group)) == (resources, set())
    assert " ".join({*flags(given)} - {*flags(without)}) == flag


def test_head_cas_reach_the_operator_with_certificate_rights() -> None:
    manifests = render("jobs.tls.caBundle=PEM", "jobs.tls.certManager=true", apis=(POD_MONITOR,))
    assert "--head-ca-file=/etc/cormorant/ca/ca.crt" in flags(manifests)
    assert find(manifests, "ConfigMap", "cormorant-ca")["data"] == {"ca.crt": "PEM"}
    pod = pod_template(manifests)
    assert {"name": "ca", "configMap": {"name": "cormorant-ca"}} in pod["spec"]["volumes"]
    assert pod["metadata"]["annotations"]["cormorant.dev/ca-bundle"]
    rules = find(manifests, "ClusterRole", "ops-cormorant")["rules"]
    assert [rule["verbs"] for rule in rules if rule["resources"] == ["certificates"]] == [["get", "create", "patch"]]
    api, metrics = find(manifests, "PodMonitor", "cormorant-jobs")["spec"]["podMetricsEndpoints"]
    assert api["tlsConfig"] == {"ca": {"configMap": {"name": "cormorant-ca", "key": "ca.crt"}}}
    assert [rule["targetLabel"] for rule in api["relabelings"]] == ["__scheme__", "instance", "__address__"]
    assert api["relabelings"][2]["replacement"] == f"{api_host('$1', '$2')}:{API_PORT}"
    assert api["relabelings"][2]["sourceLabels"][1] == "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", JOB)
    assert "relabelings" not in metrics
    unverified = render(apis=(POD_MONITOR,))
    api, _ = find(unverified, "PodMonitor", "cormorant-jobs")["spec"]["podMetricsEndpoints"]
    assert (api["tlsConfig"], len(api["relabelings"])) == ({"insecureSkipVerify": True}, 1)
    without = render()
    assert not [flag for flag in flags(without) if "ca-file" in flag]


def test_wrong_value_is_refused_with_its_name() -> None:
    wrong = sets(["tolerations[0].kei=x"])
    done = helm("template", "cormorant", str(CHART), "--kube-version", KUBERNETES, *wrong, check=False)
    assert done.returncode != 0
    assert "at '/tolerations/0': additional properties 'kei' not allowed" in done.stderr


def test_smoke_test_submits_a_job_that_the_contract_takes() -> None:
    job = runpy.run_path(str(CHART / "files" / "smoke_test.py"))["JOB"]
    assert parse_job(job).metadata.name == "smoke-test"


@pytest.mark.parametrize(
    ("values", "apis", "has_user"),
    [
        ((), (), True),
        ((), ("security.openshift.io/v1",), False),
        (("fixedUser=always",), ("security.openshift.io/v1",), True),
        (("fixedUser=never",), (), False),
    ],
)
def test_user_is_named_but_where_the_platform_gives_one(
    values: tuple[str, ...], apis: tuple[str, ...], has_user: bool
) -> None:
    manifests = render(*values, apis=apis)
    spec = pod_template(manifests)["spec"]
    for security in (spec["securityContext"], find(manifests, "Pod")["spec"]["securityContext"]):
        assert ("runAsUser" in security, "fsGroup" in security) == (has_user, has_user)
        assert security["runAsNonRoot"] is True
    assert ("--any-user" in spec["containers"][0]["args"]) is not has_user


def test_pods_run_on_linux_and_jobs_on_the_images_architectures() -> None:
    spec = pod_template(render("nodeSelector.disk=ssd"))["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", "disk": "ssd"}
    assert "--architecture=amd64" in spec["containers"][0]["args"]


def test_dashboards_are_config_maps_that_the_sidecar_finds() -> None:
    found = {m["metadata"]["name"]: m for m in render() if m["kind"] == "ConfigMap"}
    assert set(found) == {f"cormorant-{name}-dashboard" for name in ("fleet", "job", "operator")}
    for manifest in found.values():
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = manifest["data"].items()
        assert json.loads(text) == json.loads((CHART / "files" / "dashboards" / name).read_text())
        assert len(text) < 1_000_000

"""Head and worker pods as JSON. They satisfy the `restricted` PodSecurity level.

Both start `python -m cormorant_worker.supervisor` as process 1 of a container that is never restarted.
docs/reference/pods.md describes it and its exit codes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cormorant_contract import children
from cormorant_contract.job import API_VERSION, KIND
from cormorant_contract.workers import Head, WorkerGroup
from cormorant_operator import names
from cormorant_operator.job import Job
from cormorant_operator.names import Manifest
from cormorant_operator.settings import OperatorDefaults
from cormorant_operator.workload import NO_PLACEMENT, Placement

GPU = "nvidia.com/gpu"
GCS_PORT, WORKER_PORT = 6379, 8000
_JOB_FOLDER, _TOKEN_FOLDER, _TLS_FOLDER = "/etc/cormorant/job", "/etc/cormorant/tokens", "/etc/cormorant/tls"
_STATE_FOLDER = "/var/lib/cormorant"
_TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes' default path of termination messages."""
_SUPERVISOR = ("python", "-m", "cormorant_worker.supervisor")
_COMMON: Mapping[str, str] = {
    "HOME": "/tmp",
    # A user ID assigned by the platform has no entry in /etc/passwd, where libraries look up the name.
    "USER": "cormorant",
    "PYTHONUNBUFFERED": "1",
    "RAY_AUTH_MODE": "token",
    "CORMORANT_LAST_WORDS": _TERMINATION_LOG,
}
_SCRAPED: Mapping[str, str] = {
    "prometheus.io/scrape": "true",
    "prometheus.io/port": str(WORKER_PORT),
    "prometheus.io/path": "/metrics",
}
"""Pod annotations for a Prometheus without PodMonitors; a pod template can override them."""
_REQUESTS: Mapping[str, Mapping[str, str]] = {
    children.HEAD: {"cpu": "250m", "memory": "1Gi"},
    children.WORKER: {"cpu": "100m", "memory": "512Mi"},
}
"""Default requests: the needs of an idle container of each role."""
_SCRATCH_SIZE, _STATE_SIZE = "10Gi", "20Gi"
"""Limits on what a pod may write to its node's disk; a pod that exceeds them is evicted."""
_CODE_OF_IMAGE = "code"
"""Folder of `spec.code.image` with the user's code."""
_USER = 65532
_NODE_LOST_S = 30
"""Seconds after which pods of a lost node are given up; Kubernetes' default is five minutes."""
_READY_S = 55
"""How long the readiness probe of a starting pod waits for its answer."""
_GRACE_S = 60
"""Default time from SIGTERM to SIGKILL. A worker finishes its batch in it, and a head drains for half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOrigin:
    """Image, failure counts, Kueue's placement and the gang that a new pod is created with."""

    base_image: str
    cuda_image: str = ""
    """Image of workers with a device; empty: `base_image`."""
    failures: int = 0
    restarts: int = 0
    placement: Placement = NO_PLACEMENT
    gang: str = ""
    """Name of its PodGroup; empty: none."""


def owner_reference(job: Job) -> dict[str, Any]:
    """Owner reference: Kubernetes deletes the job's objects when the job is gone."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def head_pod(
    job: Job, defaults: OperatorDefaults, origin: PodOrigin, *, epoch: int, floor_frames: int, version: int = 0
) -> Manifest:
    """The head pod of an epoch. `floor_frames` and `version`: frames that are not collected again and newest weights of
    earlier heads.
    """
    head = job.spec.head
    claim = head.persistence.claim_name
    state = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {"sizeLimit": _STATE_SIZE}}
    grace_s = _grace_s(head.template)
    own = {"CORMORANT_EPOCH": str(epoch), "CORMORANT_PUBLISHED_VERSION": str(version)}
    container: dict[str, Any] = {
        "command": [
            *(*_SUPERVISOR, "head", "--"),
            *("python", "-m", "cormorant_api", "--job", f"{_JOB_FOLDER}/job.yaml"),
            *("--fleet", "ray", "--ray-address", "auto", "--ray-slot-resources"),
            *("--host", "0.0.0.0", "--port", str(children.API_PORT), "--data-port", str(children.DATA_PORT)),
            *("--directory", _STATE_FOLDER, "--token-file", f"{_TOKEN_FOLDER}/tokens.json"),
            *("--epoch", str(epoch), "--floor-frames", str(floor_frames), "--drain-seconds", str(grace_s // 2)),
            *("--last-words", _TERMINATION_LOG),
        ],
        "env": _environment(job, own),
        "ports": [
            {"name": "api", "containerPort": children.API_PORT},
            {"name": "data", "containerPort": children.DATA_PORT},
            {"name": "gcs", "containerPort": GCS_PORT},
        ],
        "volumeMounts": [
            {"name": "job", "mountPath": _JOB_FOLDER, "readOnly": True},
            {"name": "tokens", "mountPath": _TOKEN_FOLDER, "readOnly": True},
            {"name": "state", "mountPath": _STATE_FOLDER},
        ],
        **_probes(children.API_PORT, listens_after_s=5, scheme="HTTPS" if head.tls is not None else "HTTP"),
    }
    # Not world-readable: the head rejects a token file that others can read.
    tokens = {
        **_secret_volume(children.tokens_secret(job.name)),
        "items": [{"key": "tokens.json", "path": "tokens.json"}],
    }
    volumes = [
        {"name": "job", "configMap": {"name": names.config_map(job.name, job.templates.config)}},
        {"name": "tokens", "secret": tokens},
        {"name": "state", **state},
    ]
    if head.tls is not None:
        volumes.append({"name": "tls", "secret": _secret_volume(head.tls.secret_name or children.tls_secret(job.name))})
        container["volumeMounts"].append({"name": "tls", "mountPath": _TLS_FOLDER, "readOnly": True})
        container["command"] += [names.TLS_OPTION, f"{_TLS_FOLDER}/tls.crt", "--tls-key", f"{_TLS_FOLDER}/tls.key"]
    return _pod(
        job,
        defaults,
        origin,
        head,
        name=names.head_pod(job.name, epoch=epoch),
        labels={children.EPOCH: str(epoch), names.TEMPLATE: job.templates.head},
        annotations={
            **({"prometheus.io/scheme": "https"} if head.tls is not None else {}),
            **({names.CUDA_IMAGE: origin.cuda_image} if origin.cuda_image else {}),
        },
        grace_s=grace_s,
        container=container,
        volumes=volumes,
    )


def worker_pod(
    job: Job, defaults: OperatorDefaults, origin: PodOrigin, *, group: WorkerGroup, index: int, attempt: int
) -> Manifest:
    grace_s, template = _grace_s(group.template), job.templates.worker(group)
    openenv = None if group.serves else job.spec.env.openenv
    own = {
        "CORMORANT_HEAD": f"{names.head_service(job.name)}:{GCS_PORT}",
        "CORMORANT_GROUP": group.name,
        "CORMORANT_INDEX": str(index),
        "CORMORANT_GRACE_SECONDS": str(grace_s),
    }
    sidecars, port = [], WORKER_PORT
    if openenv is not None and openenv.image is not None:
        own["CORMORANT_OPENENV_URL"] = f"http://127.0.0.1:{openenv.port}"
        if openenv.port == port:  # the server has it; DATA_PORT is open in the policy, too
            port = children.DATA_PORT
            own["CORMORANT_PROBE_PORT"] = str(port)
        sidecars.append(_openenv_server(openenv.image, openenv.port))
    return _pod(
        job,
        defaults,
        origin,
        group,
        name=names.worker_pod(job.name, job.uid, group=group.name, index=index, attempt=attempt),
        labels={
            children.GROUP: group.name,
            children.INDEX: str(index),
            children.ATTEMPT: str(attempt),
            names.TEMPLATE: template,
        },
        grace_s=grace_s,
        container={
            "command": [*_SUPERVISOR, "worker"],
            "env": _environment(job, own),
            "ports": [{"name": "metrics", "containerPort": port}],
            "volumeMounts": [],
            **_probes(port, listens_after_s=2),
        },
        volumes=[],
        annotations={"prometheus.io/port": str(port)},
        sidecars=sidecars,
    )


def _secret_volume(name: str) -> dict[str, Any]:
    return {"secretName": name, "defaultMode": 0o440}


def _environment(job: Job, own: Mapping[str, str]) -> list[dict[str, Any]]:
    """Environment of a container: its own variables and the common ones."""
    secret = {"name": children.tokens_secret(job.name), "key": "ray"}
    return [
        *({"name": name, "value": value} for name, value in {**_COMMON, "CORMORANT_JOB": job.name, **own}.items()),
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]


def _openenv_server(image: str, port: int) -> dict[str, Any]:
    """A container that starts before the worker, ends after it, and restarts alone. Its root file system is writable:
    such servers are third-party programs.
    """
    container = _container("openenv", image, {})
    return {
        **container,
        "restartPolicy": "Always",
        "securityContext": {**container["securityContext"], "readOnlyRootFilesystem": False},
        "ports": [{"name": "openenv", "containerPort": port}],
        "startupProbe": {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 1, "failureThreshold": 300},
    }


def _pod(
    job: Job,
    defaults: OperatorDefaults,
    origin: PodOrigin,
    part: Head | WorkerGroup,
    *,
    name: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    grace_s: int,
    container: Mapping[str, Any],
    volumes: list[dict[str, Any]],
    sidecars: Sequence[dict[str, Any]] = (),
) -> Manifest:
    role, is_gpu = (children.WORKER, part.device == "gpu") if isinstance(part, WorkerGroup) else (children.HEAD, False)
    # Writable, unlike the read-only root: /tmp, and /dev/shm for Ray's object store, which counts as memory.
    volumes = [
        *volumes,
        {"name": "tmp", "emptyDir": {"sizeLimit": _SCRATCH_SIZE}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
    resources = _with_defaults(role, part.resources, part.template, is_gpu=is_gpu)
    code, code_folder, init_containers, env = job.spec.code, children.CODE_FOLDER, [*sidecars], [*container["env"]]
    if code is not None:
        mount: dict[str, Any] = {"name": "code", "mountPath": children.CODE_FOLDER}
        source: dict[str, Any] = {"configMap": {"name": code.config_map}}
        if code.image and defaults.has_image_volumes:
            source = {"image": {"reference": code.image, "pullPolicy": "IfNotPresent"}}
            # The whole image: containerd before 2.2 ignores the subPath of such a mount.
            code_folder = f"{children.CODE_FOLDER}/{_CODE_OF_IMAGE}"
        elif code.image:
            source = {"emptyDir": {"sizeLimit": _SCRATCH_SIZE}}
            copy = ["cp", "-R", f"/{_CODE_OF_IMAGE}/.", children.CODE_FOLDER]
            init_containers.append(
                {**_container("code", code.image, resources), "command": copy, "volumeMounts": [mount]}
            )
        volumes.append({"name": "code", **source})
        mounts.append({**mount, "readOnly": True})
        # Replaces the image's own PYTHONPATH, which the operator does not know and so cannot extend.
        env.append({"name": "PYTHONPATH", "value": f"{code_folder}:{code_folder}/{children.CODE_ARCHIVE}"})
    image = (is_gpu and origin.cuda_image) or origin.base_image
    dataset = job.spec.output.dataset
    container = {
        **_container(role, image, resources),
        **({"envFrom": [{"secretRef": {"name": dataset.secret}}]} if dataset is not None and dataset.secret else {}),
        **container,
        "env": env,
        "volumeMounts": [*container["volumeMounts"], *mounts],
    }
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _NODE_LOST_S}
    base = {
        "metadata": {"annotations": {**_SCRAPED, **annotations}},
        "spec": {
            "terminationGracePeriodSeconds": grace_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "imagePullSecrets": [{"name": name} for name in defaults.image_pull_secrets],
            "securityContext": {
                "runAsNonRoot": True,
                **({"runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER} if defaults.has_fixed_user else {}),
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **_placement(defaults, origin),
            **({"schedulingGroup": {"podGroupName": origin.gang}} if origin.gang else {}),
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", **lost},
                {"key": "node.kubernetes.io/unreachable", **lost},
                # Clouds taint GPU nodes with this key; some do not add the toleration by themselves.
                *([{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}] if is_gpu else ()),
            ],
            **({"initContainers": init_containers} if init_containers else {}),
            "containers": [container],
            "volumes": volumes,
        },
    }
    template, placement = merge(base, part.template), origin.placement
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    metadata = metadata if isinstance(metadata, Mapping) else {"annotations": metadata}
    if placement != NO_PLACEMENT and isinstance(spec, Mapping):
        # Kueue derived it from the template, or from the one before.
        tolerations = spec.get("tolerations") or []
        own = [*tolerations, *placement.tolerations] if isinstance(tolerations, list) else tolerations
        node_selector = _over(spec.get("nodeSelector"), placement.node_selector)
        spec = {**spec, "nodeSelector": node_selector, "tolerations": own}
    # A user's template cannot override identity, ownership and restartPolicy. The dry run names its other fields.
    return {
        **template,
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": _over(
                metadata.get("labels"),
                {
                    **placement.labels,
                    **names.child_labels(job.name, job.uid, role=role),
                    **labels,
                },
            ),
            "annotations": _over(
                metadata.get("annotations"),
                {
                    **placement.annotations,
                    names.BASE_IMAGE: origin.base_image,
                    names.FAILURES: str(origin.failures),
                    children.RESTARTS: str(origin.restarts),
                },
            ),
            "ownerReferences": [owner_reference(job)],
        },
        "spec": _over(spec, {"restartPolicy": "Never"}),
    }


def _over(given: Any, own: Mapping[str, Any]) -> Any:
    """A template's fields and ours. What is not an object stays: the API server rejects it in its own words."""
    return {**(given or {}), **own} if isinstance(given or {}, Mapping) else given


def _container(name: str, image: str, resources: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "resources": resources,
        # Without a termination message, Kubernetes reports the last lines of the log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _grace_s(overlay: Mapping[str, Any]) -> int:
    """Time from SIGTERM to SIGKILL. Processes are told the same value as the kubelet."""
    given = _part(overlay, "spec").get("terminationGracePeriodSeconds")
    # The API server rejects invalid values with a better message.
    return given if isinstance(given, int) and not isinstance(given, bool) and given >= 0 else _GRACE_S


def _part(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """`document[key]` if it is an object, else empty: a user's template may be invalid."""
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def _with_defaults(
    role: str, resources: Mapping[str, Any], overlay: Mapping[str, Any], *, is_gpu: bool
) -> dict[str, Any]:
    """The manifest's resources, plus default requests and the device of a gpu worker."""
    spec, filled = _part(overlay, "spec"), dict(resources)
    given, containers = resources, spec.get("containers")
    for container in containers if isinstance(containers, list) else ():
        if isinstance(container, Mapping) and container.get("name") == role:
            given = merge(resources, _part(container, "resources"))
            break
    named = {**_part(given, "requests"), **_part(given, "limits")}
    if "resources" not in spec:
        # Set no default for a resource that the user names: it might exceed the user's limit.
        missing = {key: value for key, value in _REQUESTS[role].items() if key not in named}
        filled["requests"] = {**missing, **_part(resources, "requests")}
    # Devices have many names (MIG slices, time-sliced shares, other vendors), and resource claims have none.
    has_device = any("/" in key for key in named) or bool(given.get("claims")) or bool(spec.get("resourceClaims"))
    if is_gpu and not has_device:
        filled["limits"] = {**_part(resources, "limits"), GPU: 1}
    return filled


def _placement(defaults: OperatorDefaults, origin: PodOrigin) -> dict[str, Any]:
    """Restrict nodes to Linux and, if known, to the image's architectures."""
    selector = {"kubernetes.io/os": "linux"}
    known = defaults.architectures if origin.base_image == defaults.image else ()
    if len(known) == 1:
        return {"nodeSelector": {**selector, "kubernetes.io/arch": known[0]}}
    if not known:
        return {"nodeSelector": selector}
    expression = {"key": "kubernetes.io/arch", "operator": "In", "values": list(known)}
    required = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return {"nodeSelector": selector, "affinity": affinity}


def _probes(port: int, *, listens_after_s: int, scheme: str = "HTTP") -> dict[str, Any]:
    def probe(path: str, *, period_s: int, failures: int, timeout_s: int = 5, **more: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": port, **({"scheme": scheme} if scheme != "HTTP" else {})},
            "periodSeconds": period_s,
            "timeoutSeconds": timeout_s,
            "failureThreshold": failures,
            **more,
        }

    return {
        # Importing torch and Ray takes long on a busy node. A process that hangs later is killed after a minute.
        "startupProbe": probe("/livez", period_s=2, failures=150, timeout_s=30, initialDelaySeconds=listens_after_s),
        "livenessProbe": probe("/livez", period_s=10, failures=6),
        # The answer waits for the pod to become ready: then it answers at once, and a start produces no series of
        # warnings.
        "readinessProbe": probe(f"/readyz?wait={_READY_S}", period_s=1, failures=3, timeout_s=_READY_S + 5),
    }


# -- templates -------------------------------------------------------------------------------------------------


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `overlay`, a user's template, into a copy of `base`.

    Objects are merged key by key. Lists of named items are merged by name: containers, volumes, env and ports by
    `name`, mounts by `mountPath`. Other lists are replaced. A null removes the key.

    Example: `merge({"containers": [{"name": "a", "image": "x"}]}, {"containers": [{"name": "a", "tty": True}]})` is
    `{"containers": [{"name": "a", "image": "x", "tty": True}]}`.
    """
    result = dict(base)
    for key, value in overlay.items():
        before = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = merge(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, list) and isinstance(before, list):
            result[key] = _merge_lists(before, value)
        else:
            result[key] = value
    return result


def _merge_lists(base: list[Any], overlay: list[Any]) -> list[Any]:
    # mountPath first: the mounts of one volume share its name.
    for key in ("mountPath", "name"):
        if all(isinstance(item, Mapping) and isinstance(item.get(key), str) for item in (*base, *overlay)):
            added = {item[key]: item for item in overlay}
            merged = [merge(item, added.pop(item[key], {})) for item in base]
            return [*merged, *(item for item in overlay if item[key] in added)]
    return overlay

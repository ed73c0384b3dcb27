"""A job's Services, policies, ConfigMap and Secret as JSON, and digests that reveal changes by others."""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from cormorant_contract import children
from cormorant_contract.job import API_VERSION, KIND
from cormorant_operator import names
from cormorant_operator.job import Job
from cormorant_operator.names import Manifest
from cormorant_operator.render.pods import GCS_PORT, WORKER_PORT, owner_reference

_GANG_FIELDS = ("schedulerName", "priorityClassName", "priority", "preemptionPolicy")
"""Fields in which all pods of a PodGroup agree; its scheduler refuses the whole group otherwise."""
_OWN_FIELDS: Mapping[str, tuple[str, ...]] = {
    "NetworkPolicy": ("podSelector", "policyTypes", "ingress", "egress"),
    "PodDisruptionBudget": ("minAvailable", "selector", "unhealthyPodEvictionPolicy"),
    "PodGroup": ("schedulingPolicy",),
    "Certificate": ("secretName", "dnsNames", "issuerRef", "usages"),
}
"""Fields of a spec that the operator owns, by kind."""


def services(job: Job, *, epoch: int) -> list[Manifest]:
    """The head's Services. Their selectors contain the epoch, so that an old head that returns gets no traffic."""
    common = {
        "selector": {children.JOB_UID: job.uid, children.ROLE: children.HEAD, children.EPOCH: str(epoch)},
        "ipFamilyPolicy": "PreferDualStack",
    }
    # Workers must reach Ray before the head is ready, because it becomes ready only when the first worker joins. A
    # ClusterIP rather than a headless Service: clients cache DNS answers for seconds after a head is gone.
    ray = {**common, "publishNotReadyAddresses": True, "ports": [_port("gcs", GCS_PORT)]}
    ports = [_port("api", children.API_PORT), _port("data", children.DATA_PORT)]
    api = {**common, "publishNotReadyAddresses": False, "ports": ports}
    return [
        child(job, "Service", names.head_service(job.name), {"spec": ray}),
        child(job, "Service", children.api_service(job.name), {"spec": api}),
    ]


def network_policy(job: Job) -> Manifest:
    """Pods of the job reach each other on every port; other pods reach the API, bulk data and metrics ports."""
    own = {"matchLabels": {children.JOB_UID: job.uid}}
    ports = sorted({children.API_PORT, children.DATA_PORT, WORKER_PORT})
    spec = {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": own}]},
            {"from": [{"namespaceSelector": {}}], "ports": [{"port": port, "protocol": "TCP"} for port in ports]},
        ],
    }
    return child(job, "NetworkPolicy", f"{job.name}-pods", {"spec": spec}, api_version="networking.k8s.io/v1")


def budgets(job: Job, *, workers: int) -> list[Manifest]:
    """The PodDisruptionBudgets that `runPolicy.disruptionBudget` requests. `workers`: total of all groups."""
    policy = job.spec.run_policy
    kept = {} if policy.disruption_budget == "None" else {children.HEAD: 1}
    if policy.disruption_budget == "All":
        kept[children.WORKER] = max(0, workers - policy.unavailable_of(workers))
    budgets = []
    for role, least in kept.items():
        spec = {
            # A number: percentages and maxUnavailable need a controller with a scale subresource that Kubernetes knows.
            "minAvailable": least,
            "selector": {"matchLabels": {children.JOB_UID: job.uid, children.ROLE: role}},
            # A broken pod must not block a node drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
        budgets.append(child(job, "PodDisruptionBudget", f"{job.name}-{role}", {"spec": spec}, api_version="policy/v1"))
    return budgets


def pod_groups(job: Job, *, workers: int) -> list[Manifest]:
    """The PodGroup with which Kubernetes binds the head and `workers` workers to nodes together. None if Kueue does so,
    if a template names a group, or if the pods differ in what they must have in common.
    """
    specs = [
        template.get("spec") for template in (job.spec.head.template, *(g.template for g in job.spec.worker_groups))
    ]
    given = [spec if isinstance(spec, Mapping) else {} for spec in specs]
    priority = str(given[0].get("priorityClassName") or "")
    is_uniform = all(spec.get(key) == given[0].get(key) for spec in given for key in _GANG_FIELDS)
    if job.queue or not is_uniform or any("schedulingGroup" in spec for spec in given):
        return []
    spec = {
        "schedulingPolicy": {"gang": {"minCount": 1 + workers}},
        **({"priorityClassName": priority} if priority else {}),
    }
    # A PodGroup's priority class is immutable, and a deleted PodGroup stays until its pods are gone.
    name = f"{job.name}-gang-{names.digest(job.uid, priority)}"
    return [child(job, "PodGroup", name, {"spec": spec}, api_version="scheduling.k8s.io/v1beta1")]


def certificates(job: Job) -> list[Manifest]:
    """The head's Certificate, if the manifest requests one from cert-manager."""
    tls = job.spec.head.tls
    if tls is None or tls.cert_manager is None:
        return []
    issuer, name = tls.cert_manager.issuer_ref, children.tls_secret(job.name)
    service, namespace = children.api_service(job.name), job.namespace
    host = children.api_host(job.name, namespace)
    spec = {
        "secretName": name,
        "dnsNames": [host, f"{host}.cluster.local", f"{service}.{namespace}", service],
        "issuerRef": {"name": issuer.name, "kind": issuer.kind, "group": issuer.group},
        "usages": ["digital signature", "key encipherment", "server auth"],
    }
    return [child(job, "Certificate", name, {"spec": spec}, api_version="cert-manager.io/v1")]


def config_map(job: Job) -> Manifest:
    """The ConfigMap with the manifest that a head reads at its start; another manifest has another name."""
    metadata = json.dumps({"name": job.name, "namespace": job.namespace})
    spec = job.templates.text
    text = f'{{\n"apiVersion": "{API_VERSION}",\n"kind": "{KIND}",\n"metadata": {metadata},\n"spec": {spec}\n}}'
    return child(job, "ConfigMap", names.config_map(job.name, job.templates.config), {"data": {"job.yaml": text}})


def tokens_owner(job: Job) -> Manifest:
    """An empty ConfigMap that owns the token Secret: when the operator deletes it, Kubernetes deletes the Secret, which
    the operator itself may not do. It lacks the watched label, because nothing depends on its content.
    """
    owner = child(job, "ConfigMap", children.tokens_secret(job.name), {})
    del owner["metadata"]["labels"][names.MANAGED_BY]
    return owner


def token(key: bytes, *, uid: str, role: str) -> str:
    """Token of a role ("read", "write", "operator") or of the Ray cluster ("ray") for the job with this uid, from the
    operator's key: a restarted operator need not read Secrets. A recreated job of the same name has others.
    """
    raw = hmac.digest(key, f"{uid}/{role}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def secret(job: Job, key: bytes, *, owner: Mapping[str, Any] | None = None) -> Manifest:
    """The Secret with the job's tokens: one key per role, and the file that the head reads. `key`: the operator's;
    `owner`: the ConfigMap of `tokens_owner` as it exists, None: the job.
    """
    by_role = {role: token(key, uid=job.uid, role=role) for role in ("read", "write", "operator")}
    data = {**by_role, "ray": token(key, uid=job.uid, role="ray"), "tokens.json": json.dumps(by_role)}
    manifest = child(job, "Secret", children.tokens_secret(job.name), {"type": "Opaque", "stringData": data})
    if owner is not None:
        identity = {field: owner["metadata"][field] for field in ("name", "uid")}
        manifest["metadata"]["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "ConfigMap", **identity, "controller": True}
        ]
    return manifest


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Digest of the fields that the operator owns; equal for a rendered object and the existing one."""
    given = manifest["metadata"].get("labels") or {}
    labels = {key: value for key, value in given.items() if key in names.OWN_LABELS}
    if manifest["kind"] == "ConfigMap":
        return names.digest(labels, manifest.get("data") or {})
    spec = manifest.get("spec") or {}
    if manifest["kind"] in _OWN_FIELDS:
        return names.digest(labels, *(spec.get(key) for key in _OWN_FIELDS[manifest["kind"]]))
    ports = [[port.get("name"), port.get("port"), port.get("targetPort")] for port in spec.get("ports") or ()]
    return names.digest(
        labels, spec.get("selector"), spec.get("ipFamilyPolicy"), bool(spec.get("publishNotReadyAddresses")), ports
    )


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "port": number, "targetPort": number, "protocol": "TCP"}


def child(job: Job, kind: str, name: str, body: Mapping[str, Any], *, api_version: str = "v1") -> Manifest:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": names.child_labels(job.name, job.uid),
            "ownerReferences": [owner_reference(job)],
        },
        **body,
    }

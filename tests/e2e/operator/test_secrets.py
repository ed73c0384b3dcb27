"""Tokens and certificates of jobs on a real API server."""

import base64
from typing import Any

import pytest

from cormorant_testing.kubectl import Kubelet
from cormorant_testing.operator_scene import Scene


def test_changed_secret_is_replaced_and_no_pod_with_it(running: Scene) -> None:
    namespace, head = running.namespace, running.stub
    before, pods = namespace.get("secret", "pong-tokens"), running.uids()
    wrong = base64.b64encode(b"of another hand").decode()
    namespace("patch", "secret", "pong-tokens", "--type=merge", "-p", f'{{"data": {{"operator": "{wrong}"}}}}')
    head.accepted = "Bearer of another hand"  # as soon as its kubelet shows it to the head
    running.until(lambda: running.condition("Progressing") == "Unknown/TokenRefused", "the condition says so")

    def secret() -> dict[str, Any]:
        return next((item for item in namespace.items("secrets") if item["metadata"]["name"] == "pong-tokens"), {})

    namespace.until(
        lambda: secret().get("data") == before["data"], what="it holds the job's own tokens again", within_s=120
    )
    assert secret()["metadata"]["uid"] != before["metadata"]["uid"]
    head.accepted = f"Bearer {base64.b64decode(before['data']['operator']).decode()}"
    running.until(lambda: not running.condition("Progressing").startswith("Unknown"), "the head answers again")
    assert running.uids() == pods


NAMES = {"kind": "Certificate", "listKind": "CertificateList", "plural": "certificates", "singular": "certificate"}
ANYTHING = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
CERTIFICATES = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "certificates.cert-manager.io"},
    "spec": {
        "group": "cert-manager.io",
        "scope": "Namespaced",
        "names": NAMES,
        "versions": [{"name": "v1", "served": True, "storage": True, "schema": ANYTHING}],
    },
}


def test_certificate_is_made_once_its_kind_is_known(scene: Scene) -> None:
    crd, namespace = "certificates.cert-manager.io", scene.namespace
    if namespace("get", "crd", crd, "--ignore-not-found"):
        pytest.skip("this cluster has a cert-manager")
    tls = {"certManager": {"issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}}
    with scene.operator(), Kubelet(namespace):
        scene.submit(head={"tls": tls})
        scene.until(lambda: scene.condition("Accepted") == "False/Forbidden", "the condition says so")
        assert "install cert-manager" in scene.message("Accepted")
        namespace("create", "-f", "-", document=CERTIFICATES)
        try:
            namespace.until(lambda: scene.condition("Accepted") == "True/Accepted", what="it is made", within_s=90)
            certificate = namespace.get("certificate", "pong-tls")
            assert certificate["spec"]["secretName"] == "pong-tls"
            assert f"pong-api.{namespace.name}.svc" in certificate["spec"]["dnsNames"]
            assert certificate["metadata"]["ownerReferences"][0]["kind"] == "CollectorJob"
            head = namespace.get("pod", "pong-head-1")["spec"]
            assert "pong-tls" in [volume.get("secret", {}).get("secretName") for volume in head["volumes"]]
        finally:
            namespace("delete", "crd", crd, "--wait=false")

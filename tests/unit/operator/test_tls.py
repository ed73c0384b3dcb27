"""Heads with a certificate: what is rendered, what the operator reads back, and what a job says."""

from datetime import timedelta
from typing import Any

from cormorant_operator.defaults import OperatorDefaults
from cormorant_operator.names import Manifest
from cormorant_operator.pods import read_pod
from cormorant_operator.render.children import certificates, digest_of
from cormorant_operator.render.pods import PodOrigin, head_pod
from cormorant_testing.operator_world import World, make_job

ISSUER = {"certManager": {"issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}}


def head(**spec: Any) -> Manifest:
    origin = PodOrigin(template="abc", base_image="example/cormorant:1")
    return head_pod(make_job(**spec), OperatorDefaults(), origin, epoch=1, floor_frames=0, config="pong-config-x")


def as_seen(pod: Manifest) -> Manifest:
    return {**pod, "metadata": {**pod["metadata"], "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}}


def test_head_with_a_certificate_speaks_https_alone() -> None:
    pod = head(head={"tls": {"secretName": "mine"}})
    (container,) = pod["spec"]["containers"]
    assert container["command"][-4:] == [
        "--tls-cert",
        "/etc/cormorant/tls/tls.crt",
        "--tls-key",
        "/etc/cormorant/tls/tls.key",
    ]
    assert {"name": "tls", "secret": {"secretName": "mine", "defaultMode": 0o440}} in pod["spec"]["volumes"]
    assert {"name": "tls", "mountPath": "/etc/cormorant/tls", "readOnly": True} in container["volumeMounts"]
    probes = [container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["scheme"] for probe in probes] == ["HTTPS"] * 3
    assert pod["metadata"]["annotations"]["prometheus.io/scheme"] == "https"


def test_a_head_is_asked_as_it_was_started() -> None:
    seen = [read_pod(as_seen(pod)) for pod in (head(), head(head={"tls": {"secretName": "mine"}}))]
    assert [pod is not None and pod.is_tls for pod in seen] == [False, True]


def test_certificate_is_asked_for_only_where_the_manifest_says_so() -> None:
    assert certificates(make_job()) == certificates(make_job(head={"tls": {"secretName": "mine"}})) == []
    (certificate,) = certificates(make_job(head={"tls": ISSUER}))
    assert (certificate["apiVersion"], certificate["metadata"]["name"]) == ("cert-manager.io/v1", "pong-tls")
    assert certificate["spec"] == {
        "secretName": "pong-tls",
        "dnsNames": [
            "pong-api.team-a.svc",
            "pong-api.team-a.svc.cluster.local",
            "pong-api.team-a",
            "pong-api",
        ],
        "issuerRef": {"name": "ca", "kind": "ClusterIssuer", "group": "cert-manager.io"},
        "usages": ["digital signature", "key encipherment", "server auth"],
    }
    world = World(head={"tls": ISSUER})
    world.run()
    assert world.children["Certificate", "pong-tls"] == digest_of(certificate)
    volumes = head(head={"tls": ISSUER})["spec"]["volumes"]
    assert {"name": "tls", "secret": {"secretName": "pong-tls", "defaultMode": 0o440}} in volumes


def test_untrusted_certificate_is_a_condition_only() -> None:
    world = World(head={"tls": {"secretName": "mine"}})
    world.run()
    words = "the operator does not trust the certificate of pong-head-1"
    plan = world.plan(now=world.now + timedelta(days=1), is_silent=True, distrust=words)
    assert plan.actions == ()
    assert plan.status is not None
    (fact,) = [fact for fact in plan.status.conditions if fact.type == "Progressing"]
    assert (fact.status, fact.reason, fact.message) == ("Unknown", "CertificateRefused", words)

"""The head of a job in a cluster: its pod, token and certificate, and connections to it through the API server.

client ──> socket of the Kubernetes client ──web socket──> API server ──> kubelet ──> pod:port
"""

import base64
import binascii
import socket
from typing import TYPE_CHECKING, Unpack

from cormorant_cli.cluster import ANSWER_S, Cluster, Raw, holds, identity
from cormorant_cli.errors import CliError, CommandFailed, HeadGone, NoHead, NotAllowed, NotReady, ObjectMissing
from cormorant_contract.children import API_PORT, EPOCH, HEAD, JOB_UID, ROLE, api_host, tls_secret, tokens_secret

if TYPE_CHECKING:
    from cormorant_client import Client, ConnectOptions
    from cormorant_client.transport import Address, Role


def connect_to_head(cluster: Cluster, job: Raw, **options: Unpack["ConnectOptions"]) -> "Client":
    """A client that opens each connection to the job's newest head. `cluster` must outlive it. Trusts ca.crt of the
    job's Secret for a head with TLS, or the system's authorities if the Secret lacks it or the user may not read it.
    """
    from cormorant_client import connect

    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    answer_s = options.get("timeout_s") or ANSWER_S

    def dial(address: "Address", _timeout_s: float) -> socket.socket:
        try:
            return cluster.open_port(head_pod(cluster, job), address.port, namespace=namespace, timeout_s=answer_s)
        except CliError as error:
            raise ConnectionError(str(error)) from error

    tls = (job["spec"].get("head") or {}).get("tls")
    if tls and not options.get("ca_file") and not options.get("ca_data"):
        try:
            secret = cluster.get("Secret", tls.get("secretName") or tls_secret(name), namespace=namespace)
        except (NotAllowed, ObjectMissing):
            secret = {}
        options["ca_data"] = _decoded(secret, "ca.crt") or None
    return connect(f"{'https' if tls else 'http'}://{api_host(name, namespace)}:{API_PORT}", dial=dial, **options)


def head_pod(cluster: Cluster, job: Raw) -> str:
    """The running pod of the newest head that is not being deleted. NoHead says why there is none."""
    metadata = job["metadata"]
    heads = cluster.objects("Pod", namespace=metadata["namespace"], labels=f"{JOB_UID}={metadata['uid']},{ROLE}={HEAD}")
    live = [
        pod
        for pod in heads
        if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") not in ("Succeeded", "Failed")
    ]
    doctor = f"see `cormorant doctor {metadata['name']}{cluster.options_of(job)}`"
    if live:
        head = max(live, key=lambda pod: int(pod["metadata"]["labels"].get(EPOCH) or 0))
        if head["status"].get("phase") != "Running":
            raise NoHead(f"the head of {identity(job)} is not running yet (pod {head['metadata']['name']}); {doctor}")
        return str(head["metadata"]["name"])
    for kind in ("Completed", "Failed", "Suspended"):
        if holds(job, kind):
            uri = ((job["spec"].get("output") or {}).get("dataset") or {}).get("uri", "")
            results = f"; its results are in {uri}" if uri else ""
            kind_of_error = NoHead if kind == "Suspended" else HeadGone
            raise kind_of_error(f"{identity(job)} no longer has a head: the job is {kind}{results}")
    phase = (job.get("status") or {}).get("phase")
    reason = f"its last status says {phase}" if phase else "no operator has reconciled the job yet"
    raise NoHead(f"{identity(job)} has no head: {reason}; {doctor}")


def token_of(cluster: Cluster, job: Raw, role: "Role") -> str:
    """The token of a role, or of the next higher one, from the job's Secret."""
    from cormorant_client.transport import ROLES

    namespace, name = job["metadata"]["namespace"], tokens_secret(job["metadata"]["name"])
    try:
        secret = cluster.get("Secret", name, namespace=namespace)
    except NotAllowed as error:
        raise NotAllowed(f"{error}; alternatively, give the token with --token-file") from error
    except ObjectMissing as error:
        raise NotReady(
            f"Secret {name} with the job's tokens not found in namespace {namespace}; the operator creates it: "
            f"is it running (`cormorant doctor{cluster.options_of(job)}`)?"
        ) from error
    for candidate in ROLES[ROLES.index(role) :]:
        if token := _decoded(secret, candidate):
            return token
    raise CommandFailed(
        f"Secret {name} of namespace {namespace} has no token for role {role}; delete it, and the operator "
        "recreates it within six minutes"
    )


def _decoded(secret: Raw, key: str) -> str:
    try:
        return base64.b64decode((secret.get("data") or {}).get(key) or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""

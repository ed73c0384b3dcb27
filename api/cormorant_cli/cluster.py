"""The command line's client of the API server, the only module that imports the Kubernetes client; and what its objects
say: conditions, and phrases for messages.

Objects are plain JSON, as the server sends them. Every request has a time limit, and every refusal becomes a
one-sentence error.
"""

import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import yaml

from cormorant_cli.errors import BadInput, CommandFailed, NotAllowed, ObjectMissing, installed
from cormorant_contract.children import api_path

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Raw = dict[str, Any]
"""An object as the API server sends it."""
MANAGER = "cormorant-cli"
"""Field manager of the command line's writes."""
CONNECT_S, ANSWER_S = 5.0, 30.0
"""Timeouts of a connection attempt, and between two bytes of an answer."""
_NO_KIND = ("404 page not found", "the server could not find the requested resource")
"""Answers of an API server that lacks a kind."""
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File with a pod's own namespace."""


class Cluster:
    """A client of one API server. Close it, or use `connected`."""

    def __init__(self, api: "ApiClient", *, namespace: str, context: str) -> None:
        """Take over an authenticated client. `namespace`: of commands that name none."""
        self._api = api
        self.namespace = namespace
        self.context = context
        self.server = str(api.configuration.host)

    def close(self) -> None:
        """Close every connection. May be called twice."""
        self._api.close()

    def options_of(self, job: Raw) -> str:
        """Option that a command about a job needs besides its name: ` -n rl`, or nothing."""
        namespace = job["metadata"]["namespace"]
        return f" -n {namespace}" if namespace != self.namespace else ""

    # -- objects -----------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str, *, namespace: str = "") -> Raw:
        """One object. ObjectMissing if there is none."""
        return self._send("GET", api_path(kind, namespace, name))[0]

    def find(self, kind: str, name: str, *, namespace: str = "") -> Raw | None:
        try:
            return self.get(kind, name, namespace=namespace)
        except ObjectMissing:
            return None

    def objects(self, kind: str, *, namespace: str = "", labels: str = "") -> list[Raw]:
        """All objects of a kind with these labels, in one namespace or in all."""
        answer, _ = self._send("GET", api_path(kind, namespace), query={"labelSelector": labels})
        items: list[Raw] = answer["items"]
        return items

    def apply(self, manifest: Raw) -> tuple[Raw, bool]:
        """Create or update an object by server-side apply. Returns it, and True if it is new. BadInput if the server
        refuses the manifest.
        """
        metadata = manifest["metadata"]
        path = api_path(manifest["kind"], metadata["namespace"], metadata["name"])
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        of_apply = "application/apply-patch+yaml"
        answer, status = self._send("PATCH", path, query=query, body=manifest, content_type=of_apply)
        return answer, status == 201

    def patch(self, kind: str, name: str, body: Raw, *, namespace: str) -> Raw:
        """Merge a patch into an object."""
        path, query = api_path(kind, namespace, name), {"fieldManager": MANAGER}
        return self._send("PATCH", path, query=query, body=body, content_type="application/merge-patch+json")[0]

    def version(self) -> str:
        return str(self._send("GET", "version")[0].get("gitVersion", ""))

    # -- a port ----------------------------------------------------------------------------------------------

    def open_port(self, pod: str, port: int, *, namespace: str, timeout_s: float = ANSWER_S) -> socket.socket:
        """A new connection to a port of a pod, through the API server, within `timeout_s`. Any thread."""
        # The function beneath `kubernetes.stream.portforward`. The generated class above it would import unused models,
        # which costs two seconds per command, and allow one connection at a time.
        from kubernetes.stream.ws_client import portforward_call

        path = f"{api_path('Pod', namespace, pod)}/portforward"
        _, url, headers, _, _ = self._api.param_serialize(
            method="GET", resource_path=f"/{path}", auth_settings=["BearerToken"]
        )
        opened: Future[socket.socket] = Future()

        def connect() -> None:
            try:
                forward = portforward_call(
                    self._api.configuration, "GET", url, headers=headers, query_params=[("ports", str(port))]
                )
                # A thread of the Kubernetes client copies between this socket and the web socket until one ends.
                opened.set_result(socket.socket(fileno=forward.socket(port).detach()))
            except BaseException as error:  # noqa: BLE001  # the edge of a thread: the waiting thread raises it
                opened.set_exception(error)

        # The Kubernetes client connects without a time limit, and reports Ctrl-C as a refusal.
        threading.Thread(target=connect, name="cormorant-port-forward", daemon=True).start()
        with self._translated("GET", path):
            return opened.result(timeout_s)

    # -- one request -------------------------------------------------------------------------------------------

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> tuple[Raw, int]:
        """The server's answer and its status."""
        from urllib3 import Timeout

        headers = {"Accept": "application/json", **({"Content-Type": content_type} if body is not None else {})}
        given = {key: value for key, value in (query or {}).items() if value}
        # The generated client makes only the address and the headers: it would parse our plain JSON as models, and send
        # patches of a type that custom resources do not support.
        _, url, sent_headers, _, _ = self._api.param_serialize(
            method=method,
            resource_path=f"/{path}?{urlencode(given)}" if given else f"/{path}",
            header_params=headers,
            auth_settings=["BearerToken"],
        )
        with self._translated(method, path):
            reply = self._api.rest_client.pool_manager.request(
                method,
                url,
                headers=sent_headers,
                body=json.dumps(body) if body is not None else None,
                timeout=Timeout(connect=CONNECT_S, read=ANSWER_S),
                retries=False,
            )
        answer = _read_json(reply.data)
        words = answer.get("message") or "no object"
        is_foreign = not answer.keys() & {"kind", "gitVersion"} and words not in _NO_KIND
        if is_foreign and (reply.status < 400 or reply.status == 404):
            sentence = f"{self.server} did not answer as an API server does: {words}; is it the right context?"
            raise CommandFailed(sentence)
        if reply.status >= 400:
            raise self._refusal(method, path, reply.status, answer)
        return answer, int(reply.status)

    @contextmanager
    def _translated(self, method: str, path: str) -> Iterator[None]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            # A refused web socket: the client puts the whole answer into one string, with the body last.
            reason = str(error.reason or error)
            answer = _read_json(reason.rpartition("-+-+-")[2].strip().encode())
            if answer.get("code"):
                raise self._refusal(method, path, int(answer["code"]), answer) from error
            raise CommandFailed(f"the API server refused {method} /{path}: {' '.join(reason.split())}") from error
        except (HTTPError, OSError) as error:
            raise CommandFailed(_away(self.server, self.context, error)) from error

    def _refusal(self, method: str, path: str, status: int, answer: Raw) -> CommandFailed | BadInput:
        words = str(answer.get("message") or answer.get("reason") or f"status {status}").strip()
        where = f"the API server {self.server}"
        if status == 401:
            return NotAllowed(
                f"{where} does not accept the credentials of context {self.context}; log in again, or name another "
                "context with --context"
            )
        if status == 403 and "exceeded quota" not in words and "unable to create new content" not in words:
            return NotAllowed(f"permission denied: {words}; ask the cluster's administrator for this permission")
        if status == 404:
            if "/collectorjobs" in path and words in _NO_KIND:
                words = f"CollectorJob is not installed in the cluster at {self.server}; install the operator: "
                return ObjectMissing(words + "helm install cormorant charts/cormorant")
            return ObjectMissing(f"{words} (/{path})")
        if status == 409:
            causes = (answer.get("details") or {}).get("causes") or []
            if not causes:
                return CommandFailed(f"the object was changed at the same time: {words}; try again")
            owned = ", ".join(f"{cause.get('field', '')} ({cause.get('message', '')})" for cause in causes)
            return CommandFailed(
                f"other field managers own fields that the manifest sets: {owned}; remove them from the manifest"
            )
        if status in (400, 422):
            return BadInput(f"the API server rejected the request: {words}")
        return CommandFailed(f"{where} answered {method} /{path} with {status}: {words}")


@contextmanager
def connected(context: str = "") -> Iterator[Cluster]:
    """A client of the cluster of a context (default: the current one); in a pod without a kubeconfig, of the pod's
    cluster. BadInput if there is no kubeconfig, or no such context.
    """
    cluster, before = _connect(context), threading.excepthook

    def handle(given: threading.ExceptHookArgs) -> None:
        # A request over the broken connection reports the error.
        if given.thread is None or not given.thread.name.startswith("Kubernetes port forward proxy"):
            before(given)

    threading.excepthook = handle
    try:
        yield cluster
    finally:
        if threading.excepthook is handle:  # unless it was replaced in the meantime
            threading.excepthook = before
        cluster.close()


def _connect(context: str) -> Cluster:
    with installed("cli"):
        from kubernetes import config
        from kubernetes.client import ApiClient, Configuration

    configuration = Configuration()
    # The library reads the environment only once, when it is imported.
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        contexts, current = config.list_kube_config_contexts(files)
        known = {str(entry["name"]): entry.get("context") or {} for entry in contexts}
        name = context or str(current["name"])
        if name not in known:
            raise BadInput(f'context "{name}" not found in the kubeconfig')
        config.load_kube_config(files, context=name, client_configuration=configuration)
    except (config.ConfigException, OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError) as error:
        has_file = any(Path(file).expanduser().exists() for file in files.split(os.pathsep))
        if context or has_file or not _NAMESPACE.exists():
            raise BadInput(
                f"no kubeconfig found that names a cluster: {files}: {' '.join(str(error).split())}; set KUBECONFIG or "
                "create ~/.kube/config"
            ) from error
        config.load_incluster_config(client_configuration=configuration)
        return Cluster(ApiClient(configuration), namespace=_NAMESPACE.read_text().strip(), context="of this pod")
    namespace = str(known[name].get("namespace") or "default")
    return Cluster(ApiClient(configuration), namespace=namespace, context=name)


def _away(server: str, context: str, error: Exception) -> str:
    host = urlsplit(server).netloc or server
    reason = " ".join(str(getattr(error, "reason", "") or error).split()) or "no answer in time"
    reason = reason.partition(">: ")[2] or reason.partition("): ")[2] or reason
    return (
        f"the API server {host} of context {context} does not answer: {reason}; is the cluster up, and is it the right "
        "context?"
    )


def _read_json(content: bytes) -> Raw:
    try:
        document = json.loads(content)
    except ValueError:
        # A proxy answered, or the server without a Status object.
        return {"message": content[:300].decode(errors="replace").strip()}
    return document if isinstance(document, dict) else {}


def condition(raw: Raw, kind: str) -> Raw:
    """One of an object's conditions; empty if it was never written."""
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return next((dict(condition) for condition in conditions if condition.get("type") == kind), {})


def holds(job: Raw, kind: str) -> bool:
    return condition(job, kind).get("status") == "True"


def is_current(job: Raw) -> bool:
    """Whether the operator has seen the newest spec."""
    status = job.get("status") or {}
    return int(status.get("observedGeneration") or 0) >= int(job["metadata"].get("generation") or 0)


def why(fact: Raw) -> str:
    """A condition's reason and message, as the end of a message."""
    message = str(fact.get("message") or "").strip()
    return f"{fact.get('reason', '')}{f': {message}' if message else ''}"


def identity(job: Raw) -> str:
    """`rl/pong`, for messages."""
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"

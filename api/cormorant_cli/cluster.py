"""The API server, as the command line speaks to it; the only module of it that imports the Kubernetes client.

Objects are plain JSON, as the server sends them. Every request has a time limit, and every refusal is a sentence.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import quote, urlencode, urlsplit

import yaml

from cormorant_cli.errors import (
    BadInput,
    ClusterAway,
    ClusterFailed,
    CommandFailed,
    NotAllowed,
    ObjectConflict,
    ObjectMissing,
    installed,
)
from cormorant_contract.sentences import did_you_mean

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Raw = dict[str, Any]
"""An object as the API server sends it."""
Kind = Literal[
    "CollectorJob",
    "ConfigMap",
    "CustomResourceDefinition",
    "Deployment",
    "Event",
    "Namespace",
    "Node",
    "PersistentVolumeClaim",
    "Pod",
    "Secret",
    "SelfSubjectAccessReview",
    "Workload",
]

MANAGER = "cormorant-cli"
"""Field manager of what the command line writes."""
CONNECT_S, ANSWER_S = 5.0, 30.0
"""For a connection, and between two bytes of an answer."""
_CHUNK = 500
_PATHS: Mapping[str, tuple[str, str]] = {
    # API of the kind, its plural
    "CollectorJob": ("apis/cormorant.dev/v1alpha1", "collectorjobs"),
    "ConfigMap": ("api/v1", "configmaps"),
    "CustomResourceDefinition": ("apis/apiextensions.k8s.io/v1", "customresourcedefinitions"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "Event": ("api/v1", "events"),
    "Namespace": ("api/v1", "namespaces"),
    "Node": ("api/v1", "nodes"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "Pod": ("api/v1", "pods"),
    "Secret": ("api/v1", "secrets"),
    "SelfSubjectAccessReview": ("apis/authorization.k8s.io/v1", "selfsubjectaccessreviews"),
    "Workload": ("apis/kueue.x-k8s.io/v1beta1", "workloads"),
}
_TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


class Stream(Protocol):
    def recv(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""

    def sendall(self, data: bytes, /) -> None: ...

    def shutdown(self, how: int, /) -> None:
        """End it, from another thread too."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    container: str
    is_followed: bool = False
    tail_lines: int = -1
    """The last so many; -1: all."""
    has_times: bool = False


class Cluster:
    """A client of one API server. Close it, or use `connected`."""

    def __init__(self, api: "ApiClient", *, namespace: str, context: str, is_chosen: bool = False) -> None:
        """Take over an authenticated client.

        Args:
            api: closed by `close`.
            namespace: the one that commands work in when they name none.
            context: its name in the kubeconfig, for sentences.
            is_chosen: it is not the one that commands use when they name none.
        """
        self._api = api
        self.namespace = namespace
        self.context = context
        self._is_chosen = is_chosen
        self.server = str(api.configuration.host)
        self.now: datetime | None = None
        """The API server's clock at its last answer: ages of objects do not depend on this machine's."""

    def close(self) -> None:
        """Close every connection. May be called twice."""
        self._api.close()

    def options_of(self, job: Raw) -> str:
        """What a command about a job must say beside its name: ` -n rl --context far`, or nothing."""
        namespace = job["metadata"]["namespace"]
        options = f" -n {namespace}" if namespace != self.namespace else ""
        return options + (f" --context {self.context}" if self._is_chosen else "")

    # -- objects -----------------------------------------------------------------------------------------------

    def get(self, kind: Kind, name: str, *, namespace: str = "") -> Raw:
        """One object.

        Raises:
            ObjectMissing: there is none of this name; the sentence has near names.
        """
        return self._ask("GET", _path(kind, namespace, name))

    def find(self, kind: Kind, name: str, *, namespace: str = "") -> Raw | None:
        try:
            return self.get(kind, name, namespace=namespace)
        except ObjectMissing:
            return None

    def objects(self, kind: Kind, *, namespace: str = "", labels: str = "", fields: str = "") -> list[Raw]:
        """Every object of a kind, in one namespace or in all."""
        query = {"limit": str(_CHUNK), "labelSelector": labels, "fieldSelector": fields}
        found: list[Raw] = []
        while True:
            page = self._ask("GET", _path(kind, namespace), query=query)
            # Items of a list do not say what they are.
            found += [{"apiVersion": page["apiVersion"], "kind": kind, **item} for item in page["items"]]
            query["continue"] = page["metadata"].get("continue") or ""
            if not query["continue"]:
                return found

    def table(self, kind: Kind, name: str = "", *, namespace: str = "") -> Raw:
        """Objects as the server prints them: `columnDefinitions` and `rows`."""
        return self._ask("GET", _path(kind, namespace, name), accept=_TABLE)

    def apply(self, manifest: Raw, *, is_dry_run: bool = False, is_forced: bool = False) -> tuple[Raw, bool]:
        """Bring an object about by server-side apply. Returns it, and True when it is new.

        Raises:
            BadInput: the server refuses the manifest.
            ObjectConflict: another writer owns a field of it.
        """
        metadata = manifest["metadata"]
        path = _path(manifest["kind"], metadata.get("namespace", ""), metadata["name"])
        query = {"fieldManager": MANAGER, "force": str(is_forced).lower(), "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if is_dry_run else {}
        reply = self._send("PATCH", path, query=query, body=manifest, content_type="application/apply-patch+yaml")
        return _read_json(reply.data), reply.status == 201

    def create(self, manifest: Raw) -> Raw:
        path = _path(manifest["kind"], manifest["metadata"].get("namespace", ""))
        return self._ask("POST", path, body=manifest)

    def patch(self, kind: Kind, name: str, body: object, *, namespace: str, subresource: str = "") -> Raw:
        """Merge a patch into an object; a list is a JSON patch."""
        path = _path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        content_type = f"application/{'json-patch' if isinstance(body, list) else 'merge-patch'}+json"
        return self._ask("PATCH", path, query={"fieldManager": MANAGER}, body=body, content_type=content_type)

    def delete(self, kind: Kind, name: str, *, namespace: str, uid: str = "") -> None:
        """Delete an object; what it owns in the background."""
        body: Raw = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        body |= {"preconditions": {"uid": uid}} if uid else {}
        self._ask("DELETE", _path(kind, namespace, name), body=body)

    def may(self, verb: str, resource: str, *, namespace: str, group: str = "", subresource: str = "") -> bool:
        """Whether the user may do something; nothing is done."""
        attributes = {"verb": verb, "resource": resource, "group": group, "namespace": namespace}
        spec = {"resourceAttributes": attributes | ({"subresource": subresource} if subresource else {})}
        review = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "spec": spec}
        return bool(self.create({**review, "metadata": {}}).get("status", {}).get("allowed"))

    def refuse_namespace(self, namespace: str) -> None:
        """Say that a namespace does not exist, as far as the user may know.

        Raises:
            ObjectMissing: it does not.
        """
        try:
            self.get("Namespace", namespace)
        except NotAllowed:
            return

    def version(self) -> str:
        return str(self._ask("GET", "version").get("gitVersion", ""))

    # -- pods --------------------------------------------------------------------------------------------------

    def log(self, pod: str, options: LogOptions, *, namespace: str) -> Iterator[bytes]:
        """A container's log in pieces, as they come. With `is_followed` until the container ends.

        Raises:
            ObjectMissing: the pod is gone.
            BadInput: the container has not started.
        """
        query = {"container": options.container, "follow": str(options.is_followed).lower()}
        query |= {"tailLines": str(options.tail_lines)} if options.tail_lines >= 0 else {}
        query |= {"timestamps": "true"} if options.has_times else {}
        reply = self._send(
            "GET", f"{_path('Pod', namespace, pod)}/log", query=query, is_endless=options.is_followed, is_read=False
        )
        with self._translated("GET", "log"):
            try:
                yield from reply.response.stream(64 * 1024, decode_content=True)
            finally:
                reply.response.release_conn()

    def open_port(self, pod: str, port: int, *, namespace: str) -> Stream:
        """A new connection to a port of a pod, through the API server. Any thread.

        Raises:
            ClusterFailed: there is no way there.
        """
        # What `kubernetes.stream.portforward` ends in: by way of its generated class, models that are not needed here
        # cost every command two seconds, and the client could open one connection at a time.
        from kubernetes.stream.ws_client import portforward_call

        _, url, headers, _, _ = self._api.param_serialize(
            method="GET", resource_path=f"/{_path('Pod', namespace, pod)}/portforward", auth_settings=["BearerToken"]
        )
        with self._translated("GET", f"port {port} of {pod}"):
            forward = portforward_call(
                self._api.configuration, "GET", url, headers=headers, query_params=[("ports", str(port))]
            )
        stream: Stream = forward.socket(port)
        return stream

    # -- one request -------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, **request: Any) -> Raw:
        return _read_json(self._send(method, path, **request).data)

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        is_endless: bool = False,
        is_read: bool = True,
    ) -> Any:
        from urllib3 import Timeout

        headers = {"Accept": accept, **({"Content-Type": content_type} if body is not None else {})}
        given = {key: value for key, value in (query or {}).items() if value}
        request = self._api.param_serialize(
            method=method,
            resource_path=f"/{path}?{urlencode(given)}" if given else f"/{path}",
            header_params=headers,
            auth_settings=["BearerToken"],
        )
        # The generated serializer would read our plain JSON as models; it has done its part with the headers.
        _, url, sent_headers, _, _ = request
        # Its default for a patch is a merge that custom resources do not know.
        with self._translated(method, path):
            reply = self._api.rest_client.pool_manager.request(
                method,
                url,
                headers=sent_headers,
                body=json.dumps(body) if body is not None else None,
                timeout=Timeout(connect=CONNECT_S, read=None if is_endless else ANSWER_S),
                preload_content=False,
                retries=False,
            )
            if is_read or reply.status >= 400:
                content = reply.read()
                reply.release_conn()
            else:
                content = b""
        self.now = _read_date(reply.headers.get("Date", ""))
        if reply.status >= 400:
            raise self._refusal(method, path, reply.status, _read_json(content))
        return _Reply(status=reply.status, data=content, response=reply)

    @contextmanager
    def _translated(self, method: str, path: str) -> Iterator[None]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except HTTPError as error:
            raise ClusterAway(_away(self.server, self.context, error)) from error
        except ApiException as error:
            # A web socket that was refused: the client writes the whole answer into one text, its body last.
            reason = str(error.reason or error)
            answer = _read_json(reason.rpartition("-+-+-")[2].strip().encode())
            if answer.get("code"):
                raise self._refusal(method, path, int(answer["code"]), answer) from error
            words = " ".join(reason.split())
            raise ClusterFailed(f"the API server refused the port-forward to {path}: {words}") from error
        except OSError as error:
            raise ClusterAway(_away(self.server, self.context, error)) from error

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
            return ObjectMissing(self._missing(path, words))
        if status == 409:
            return ObjectConflict(_conflict(words, answer))
        if status in (400, 422):
            return BadInput(f"the API server rejected the request: {words}")
        if status == 429:
            return ClusterAway(f"{where} is busy: {words}; try again in a moment")
        return ClusterFailed(f"{where} answered {method} /{path} with {status}: {words}")

    def _missing(self, path: str, words: str) -> str:
        """A sentence for what is not there, with names that look alike."""
        kind, namespace, name = _parse(path)
        if kind == "CollectorJob" and words in (
            "404 page not found",
            "the server could not find the requested resource",
        ):
            return (
                f"CollectorJob is not installed in the cluster at {self.server}; install the operator: "
                "helm install cormorant charts/cormorant"
            )
        if not kind or not name:
            return words
        if namespace and (known := self._names("Namespace", "")) and namespace not in known:
            return f'namespace "{namespace}" not found{near_names(namespace, known)}'
        if kind == "Namespace":
            return f'namespace "{name}" not found{near_names(name, self._names(kind, ""))}'
        inside = f" in namespace {namespace}" if namespace else ""
        return f'{kind} "{name}" not found{inside}{near_names(name, self._names(kind, namespace))}'

    def _names(self, kind: str, namespace: str) -> list[str]:
        """Names of a kind, for hints: none when the user may not list them."""
        if kind == "Secret":
            return []
        try:
            found = self._ask("GET", _path(kind, namespace), query={"limit": str(_CHUNK)})
        except (CommandFailed, BadInput):
            return []
        return [str(item["metadata"]["name"]) for item in found.get("items", ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    status: int
    data: bytes
    response: Any


@contextmanager
def connected(context: str = "") -> Iterator[Cluster]:
    """A client of the cluster of a context, by default the current one; in a pod without a kubeconfig, of its own.

    Raises:
        BadInput: there is no kubeconfig, or no such context.
        CommandFailed: the Kubernetes client is not installed.
    """
    cluster = connect(context)
    try:
        yield cluster
    finally:
        cluster.close()


def connect(context: str = "") -> Cluster:
    """As `connected`; the caller closes it."""
    with installed("cli"):
        from kubernetes import config
        from kubernetes.client import ApiClient, Configuration

    configuration = Configuration()
    # The library would ask the environment once, when it is imported.
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        contexts, current = config.list_kube_config_contexts(files)
    except config.ConfigException as error:
        return _in_cluster(context, error)
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInput(f"cannot read the kubeconfig {files}: {' '.join(str(error).split())}") from error
    names = [str(entry["name"]) for entry in contexts]
    if context and context not in names:
        raise BadInput(f'context "{context}" not found in the kubeconfig{near_names(context, names)}')
    chosen = next((entry for entry in contexts if entry["name"] == context), current)
    if not chosen:
        raise BadInput(f"the kubeconfig has no current context; name one with --context: {', '.join(names) or 'none'}")
    try:
        config.load_kube_config(files, context=chosen["name"], client_configuration=configuration)
    except (config.ConfigException, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInput(f"cannot use the kubeconfig's context {chosen['name']}: {error}") from error
    namespace = str((chosen.get("context") or {}).get("namespace") or "default")
    is_chosen = chosen is not current and chosen["name"] != (current or {}).get("name")
    return Cluster(ApiClient(configuration), namespace=namespace, context=str(chosen["name"]), is_chosen=is_chosen)


def near_names(name: str, names: Sequence[str]) -> str:
    """The end of a sentence about a name that is not there."""
    if not names:
        return ""
    shown = f"{', '.join(sorted(names)[:5])}{' and others' if len(names) > 5 else ''}"
    return did_you_mean(name, names, otherwise=f"; there {'is' if len(names) == 1 else 'are'} {shown}")


def _in_cluster(context: str, error: Exception) -> Cluster:
    from pathlib import Path

    from kubernetes import config
    from kubernetes.client import ApiClient, Configuration

    configuration = Configuration()
    lost = BadInput(f"no kubeconfig found that names a cluster ({error}); set KUBECONFIG or create ~/.kube/config")
    if context:
        raise lost from error
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        raise lost from error
    namespace = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return Cluster(ApiClient(configuration), namespace=namespace.read_text().strip(), context="of this pod")


def _away(server: str, context: str, error: Exception) -> str:
    host = urlsplit(server).netloc or server
    reason = " ".join(str(getattr(error, "reason", "") or error).split())
    reason = reason.partition(">: ")[2] or reason.partition("): ")[2] or reason
    return (
        f"the API server {host} of context {context} does not answer: {reason}; is the cluster up, and is it the right "
        "context?"
    )


def _conflict(words: str, answer: Raw) -> str:
    causes = (answer.get("details") or {}).get("causes") or []
    owned = [f"{cause.get('field', '')} ({cause.get('message', '')})" for cause in causes]
    if owned:
        return (
            f"other field managers own fields that the manifest sets: {', '.join(owned)}; remove them from the "
            "manifest, or take them over with --force-conflicts"
        )
    return f"the object was changed at the same time: {words}; try again"


def _path(kind: str, namespace: str, name: str = "") -> str:
    api, plural = _PATHS[kind]
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{api}{inside}/{plural}" + (f"/{quote(name, safe='')}" if name else "")


def _parse(path: str) -> tuple[str, str, str]:
    """Kind, namespace and name that a path speaks of; empty where it does not."""
    for kind, (api, plural) in _PATHS.items():
        rest = path.removeprefix(f"{api}/")
        if rest == path:
            continue
        parts = rest.split("/")
        namespace = parts[1] if parts[0] == "namespaces" and len(parts) > 2 else ""
        parts = parts[2:] if namespace else parts
        if parts[0] == plural:
            return kind, namespace, parts[1] if len(parts) > 1 else ""
    return "", "", ""


def _read_date(header: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(header)
    except ValueError:
        return None
    # HTTP knows UTC alone, whatever the zone is called.
    return found.replace(tzinfo=UTC)


def _read_json(content: bytes) -> Raw:
    try:
        document = json.loads(content)
    except ValueError:
        # A proxy answered, or the server without a Status object.
        return {"message": content[:300].decode(errors="replace").strip()}
    return document if isinstance(document, dict) else {}

"""`connect`: to a head by its URL, or to a job of a cluster by its name."""

from contextlib import ExitStack
from functools import partial
from typing import Unpack

from cormorant_client import BadAddress, Client, ConnectOptions
from cormorant_client import connect as connect_to_url

__all__ = ["connect"]


def connect(
    head: str | None = None,
    *,
    namespace: str | None = None,
    context: str | None = None,
    **options: Unpack[ConnectOptions],
) -> Client:
    """Connect to a job that runs elsewhere.

        with connect("http://127.0.0.1:8000", token_file="tokens.json") as client: ...
        with connect("pong", namespace="rl") as client: ...  # through the Kubernetes API server

    Args:
        head: the URL of a head (None: environment variable CORMORANT_URL); or the name of a job, whose head is reached
            through the Kubernetes API server, with token and certificate of the job's Secrets unless `options` name
            others.
        namespace: namespace of the job; None: the context's.
        context: context of the kubeconfig; None: the current one.
        options: token, token_file, timeout_s, reconnect_s, ca_file, ca_data, server_name; see
            `ConnectOptions`.

    Raises:
        BadAddress: invalid URL, token or certificates; or there is no such job, or it has no head.
    """
    if not head or set(head) & set(":/"):
        if namespace or context:
            raise BadAddress(
                f"namespace and context belong to a job's name, and head is {head!r}; leave them out, or name the job"
            )
        return connect_to_url(head, **options)
    try:
        from cormorant_cli.cluster import connected
        from cormorant_cli.connection import connect_to_job
        from cormorant_cli.errors import CliError
    except ModuleNotFoundError as error:
        raise BadAddress(
            f'"{head}" names a job of a cluster, which needs {error.name}; pip install "cormorant[cli]", or pass a URL'
        ) from error

    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(connected(context or ""))
            client = connect_to_job(cluster, head, "write", namespace=namespace or "", **options)
            # Processes that get a shard of this client may not be allowed to read the job's Secret.
            options["token"] = client.again.keywords["token"]
        except CliError as error:
            raise BadAddress(str(error)) from error
        client.again = partial(connect, head, namespace=namespace, context=context, **options)
        client.on_close = stack.pop_all().close
        return client

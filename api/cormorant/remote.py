"""`connect`: to a head by its URL, or to a job of a cluster by its name."""

from contextlib import ExitStack
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
        with connect("pong", namespace="rl") as client: ...        # through the API server, as `cormorant status pong`

    Args:
        head: the URL of a head (None: environment variable CORMORANT_URL); or the name of a job, whose head is reached
            through the Kubernetes API server, with the token and the certificate of the job's Secrets.
        namespace: of the job; None: the context's.
        context: of the kubeconfig; None: the current one.
        options: token, token_file, timeout_s, reconnect_s, ca_file, ca_data, server_name, allow_nonfinite; see
            `ConnectOptions`.

    Raises:
        BadAddress: invalid URL, token or certificates; or there is no such job, or it has no head.
    """
    if head is None or "://" in head:
        if namespace or context:
            raise BadAddress(f"namespace and context belong to the name of a job, and {head} is a URL; leave them out")
        return connect_to_url(head, **options)
    from cormorant_cli.connection import reached
    from cormorant_cli.errors import CliError

    with ExitStack() as stack:
        try:
            place = reached(head, namespace=namespace or "", context=context or "", token=options.get("token"))
            url, found = stack.enter_context(place)
        except CliError as error:
            raise BadAddress(str(error)) from error
        client = connect_to_url(url, **(found | options))
        client.on_close = stack.pop_all().close
        return client

"""Where the API server is and how to prove who asks: found by kopf, for its watches and for our own client alike."""

from typing import Any

import kopf

from cormorant_operator.errors import SettingsError


def find_connection(settings: kopf.OperatorSettings | None = None) -> kopf.ConnectionInfo:
    """The pod's service account, else KUBECONFIG or ~/.kube/config. Reads files anew: tokens are replaced hourly.

    Raises:
        SettingsError: there is neither.
    """
    given: dict[str, Any] = {"settings": settings or kopf.OperatorSettings()}
    found = kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)
    if found is None:
        raise SettingsError("found neither a service account nor a kubeconfig; set KUBECONFIG")
    return found

"""Address and credentials of the API server, found by kopf, for its watches and for our client."""

from typing import Any

import kopf

from cormorant_operator.errors import SettingsError


def find_connection() -> kopf.ConnectionInfo:
    """Use the pod's service account, else KUBECONFIG or ~/.kube/config. Rereads the files: tokens rotate hourly.

    Raises:
        SettingsError: there is neither.
    """
    given: dict[str, Any] = {"settings": kopf.OperatorSettings()}
    found = kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)
    if found is None:
        raise SettingsError("found neither a service account nor a kubeconfig; set KUBECONFIG")
    return found

"""`helm test`: the API server takes a CollectorJob, as a dry run, and the operator is ready.

Arguments: the API server, the operator, a folder with the service account's token and namespace.
"""

import json
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

JOB = {
    "apiVersion": "cormorant.dev/v1alpha1",
    "kind": "CollectorJob",
    "metadata": {"name": "smoke-test"},
    "spec": {
        "env": {"envpool": {"taskId": "CartPole-v1", "numEnvs": 8}},
        "policy": {"random": {}},
        "collection": {"framesPerBatch": 64, "totalFrames": 64},
    },
}
ANSWER_S = 10


def main(server: str, operator: str, account: Path) -> str:
    """Returns what is wrong; empty: nothing."""
    namespace, token = (account / "namespace").read_text(), (account / "token").read_text()
    jobs = f"{server}/apis/cormorant.dev/v1alpha1/namespaces/{namespace}/collectorjobs"
    request = urllib.request.Request(f"{jobs}?dryRun=All&fieldValidation=Strict", data=json.dumps(JOB).encode())
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(
            request, timeout=ANSWER_S, context=ssl.create_default_context(cafile=str(account / "ca.crt"))
        ):
            sys.stdout.write("the API server takes a CollectorJob\n")
    except urllib.error.HTTPError as error:
        return f"the API server refuses a CollectorJob: {error.read().decode(errors='replace')}"
    except OSError as error:
        return f"the API server {server} does not answer: {error}"
    try:
        with urllib.request.urlopen(f"{operator}/readyz", timeout=ANSWER_S):
            sys.stdout.write("the operator is ready\n")
    except OSError as error:
        return f"the operator {operator} is not ready: {error}; see kubectl logs"
    return ""


if __name__ == "__main__":
    # An empty string would be a failure with nothing to say.
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])) or 0)

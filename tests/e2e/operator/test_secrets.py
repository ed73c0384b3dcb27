"""Tokens of jobs on a real API server."""

import base64
from typing import Any

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

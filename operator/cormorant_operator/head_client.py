"""Client of heads: polls their status and sends commands. Every request has a timeout."""

import ssl
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from cormorant_contract.children import api_host
from cormorant_contract.rest.control import Desired, DesiredReport
from cormorant_contract.rest.status import Status
from cormorant_operator.errors import HeadSilent, SettingsError, TokenRefused
from cormorant_operator.job import Job
from cormorant_operator.job_state import HeadAnswer, Waits
from cormorant_operator.pods import Pod
from cormorant_operator.render.children import token
from cormorant_operator.settings import DEFAULT_URL

T = TypeVar("T", bound=BaseModel)
ANSWER_S = 2.0
"""Timeout of a request."""
_KEEP_ALIVE_S = 70.0
"""Idle time after which a connection is closed; less than the 75 s after which a head closes it."""
_MAX_BYTES = 4 << 20
_TROUBLES = ("Failed", "EnvironmentsFailing", "WeightsMissing")


class HeadClient:
    """Client of all heads. Belongs to one event loop."""

    def __init__(self, *, key: bytes, url: str = DEFAULT_URL, ca_file: Path | None = None) -> None:
        """`url` may contain {scheme}, {ip}, {namespace} and {job}. `ca_file`: authorities that are trusted for
        heads' certificates beside the system's.

        It uses the pod's own address rather than the Service's, so that the answer is known to come from this head.
        """
        self._key, self._url = key, url
        self._trust = ssl.create_default_context()
        if ca_file is not None:
            try:
                self._trust.load_verify_locations(ca_file)
            except (OSError, ssl.SSLError) as error:
                raise SettingsError(f"cannot read certificates of --head-ca-file {ca_file}: {error}") from error
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=_KEEP_ALIVE_S),
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, job: Job, head: Pod) -> HeadAnswer:
        """Poll a head. Raises HeadSilent without a valid answer within ANSWER_S."""
        status = await self._call(job, head, "GET", "/v1/status", Status)
        desired, queue, output = status.desired, status.queue, job.spec.output.queue
        is_held = output is not None and output.on_full == "wait" and queue.capacity > 0
        return HeadAnswer(
            pod_uid=head.uid,
            phase=status.phase,
            frames=status.frames.collected,
            settled=status.frames.settled,
            per_second=status.frames.per_second,
            version=status.weights.version,
            min_applied_version=status.weights.min_applied_version,
            sizes=dict(desired.groups),
            empty_slots=desired.empty_slots,
            is_resizing=desired.pending,
            pause_state=status.pause_state,
            is_leased=bool(status.pauses),
            is_spec_paused=desired.paused,
            is_queue_full=is_held and queue.waiting + queue.ready + queue.lent >= queue.capacity,
            waits=_waits(job, status),
            troubles={
                fact.type: fact.message
                for fact in status.conditions
                if fact.type in _TROUBLES and fact.status == "True"
            },
        )

    async def set_desired(self, job: Job, head: Pod, desired: Desired) -> None:
        """Set group sizes and pause. Raises HeadSilent if the head did not confirm them."""
        body = desired.model_dump(mode="json", exclude_defaults=True)
        await self._call(job, head, "PUT", "/v1/desired", DesiredReport, body=body)

    async def drain(self, job: Job, head: Pod) -> None:
        """Start the head's drain. Raises HeadSilent if the head did not confirm it."""
        await self._call(job, head, "POST", "/v1/drain", Status)

    async def _call(self, job: Job, head: Pod, method: str, path: str, answer: type[T], *, body: Any = None) -> T:
        place = {
            "scheme": "https" if head.is_tls else "http",
            "ip": f"[{head.ip}]" if ":" in head.ip else head.ip,
            "namespace": job.namespace,
            "job": job.name,
        }
        url, request = self._url.format(**place) + path, f"{method} {path}"
        headers = {"Authorization": f"Bearer {token(self._key, uid=job.uid, role='operator')}"}
        try:
            async with self._session.request(
                method,
                url,
                json=body,
                headers=headers,
                ssl=self._trust,
                # The head is addressed by its IP, but its certificate names its Service.
                server_hostname=api_host(job.name, job.namespace) if head.is_tls else None,
            ) as response:
                content = bytearray()
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > _MAX_BYTES:
                        raise HeadSilent(f"{head.name} answered {request} with more than {_MAX_BYTES} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            words = str(error) or repr(error)
            raise HeadSilent(f"{head.name} did not answer {request} within {ANSWER_S:.0f} s: {words}") from error
        if response.status >= 400:
            words = content[:300].decode(errors="replace")
            kind = TokenRefused if response.status == 401 else HeadSilent
            raise kind(f"{head.name} answered {request} with {response.status}: {words}")
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            raise HeadSilent(f"{head.name} answered {request} with a body that cannot be parsed: {error}") from error


def _waits(job: Job, status: Status) -> Waits | None:
    """Waits only if a group autoscales: they change with every answer."""
    if all(g.autoscale is None for g in job.spec.worker_groups):
        return None
    if status.desired.pending or status.pause_state != "running" or any(g.ready != g.desired for g in status.groups):
        return None
    return Waits(
        consumer_s=status.queue.consumer_wait_seconds,
        idle_s={group.name: group.idle_seconds for group in status.groups},
        worker_s={group.name: group.worker_seconds for group in status.groups},
        sizes=dict(status.desired.groups),
    )

"""Carries out the actions of a plan. Decides nothing: the API server's answers are input of the next reconcile.

Stopping between any two actions is harmless, because the next plan starts from what exists then.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

import structlog

from cormorant_contract.children import QUEUE, tokens_secret
from cormorant_contract.job import API_VERSION, KIND
from cormorant_contract.status import CollectorJobStatus
from cormorant_operator import errors
from cormorant_operator.cache import Cache
from cormorant_operator.decide import plan
from cormorant_operator.head_client import HeadClient
from cormorant_operator.job import Identity, Job
from cormorant_operator.job_state import JobState, RefusalKind, Verdict
from cormorant_operator.kube.client import KubeClient
from cormorant_operator.names import Manifest
from cormorant_operator.pods import NodeFact, controller_uid, read_node
from cormorant_operator.render.children import secret, tokens_owner
from cormorant_operator.workload import read_flavor

log = structlog.get_logger()
_ABSENT_KINDS = {
    "Certificate": "install cert-manager, or give head.tls.secretName",
    "Workload": f"install Kueue 0.15 or newer, or remove the label {QUEUE} from the job",
}
"""Kinds of other projects, and the remedy if the API server does not know them."""
_CREATIONS = (plan.CheckTemplate, plan.CreatePod, plan.ApplyChild, plan.CreateTokens)
_OWN_RIGHTS = "cannot create resource"
"""RBAC's words about the operator itself, which no template causes."""
_LEAVING_LOOKS = 10
"""Attempts, one second apart, before a Secret of an unknown owner counts as taken."""


class Executor:
    def __init__(
        self, api: KubeClient, heads: HeadClient, cache: Cache, *, key: bytes, clock: Callable[[], datetime]
    ) -> None:
        """Every write updates `cache` at once. Job tokens are derived from `key`. `clock` returns aware times."""
        self._api, self._heads, self._cache = api, heads, cache
        self._key, self._clock = key, clock

    async def do(self, job: Job, action: plan.Action, state: JobState, *, decided_at: datetime) -> None:
        """Carry out one action, unless its owner was refused since `decided_at`, the time of the plan. A refusal by the
        API server is recorded in `state`; KubeConflict (the object changed since) and Unreachable are raised.
        """
        owner, prefix = plan.refusal_of(action)
        refused = state.refusals.get(owner)
        if refused is not None and refused.at >= decided_at:
            return
        try:
            match action:
                case plan.CheckTemplate():
                    await self._check(job, action, state)
                case plan.ApplyChild():
                    await self._apply(job, action.manifest)
                case plan.CreateTokens():
                    await self._create_tokens(job, action, state)
                case plan.CreatePod():
                    await self._create_pod(job, action)
                case plan.Delete():
                    await self._delete(job, action)
                case plan.Patch():
                    await self._patch(job, action)
                case plan.ReadQueueObject():
                    await self._read_queue_object(action, state)
                case plan.DeleteJob():
                    await self._delete_job(job)
                case plan.CheckNode():
                    await self._check_node(action.name, state)
                case plan.SetDesired() | plan.DrainHead():
                    await self._send_to_head(job, action)
        except (errors.KubeRefused, errors.KubeNotFound, errors.ServerFault) as error:
            kind = _kind_of(error, is_creation=isinstance(action, _CREATIONS))
            words = prefix + (error.message or f"the API server answered {error.code} {error.reason}".rstrip())
        except errors.NameTaken as taken:
            kind = RefusalKind.LEAVING if taken.is_leaving else RefusalKind.CONFLICT
            words = str(taken)
        else:
            state.refusals.pop(owner, None)
            return
        state.refuse(owner, kind, words, at=self._clock())
        log.warning("refused", owner=owner, namespace=job.namespace, kind=kind.value, reason=words)

    async def write_status(self, job: Identity, status: CollectorJobStatus) -> None:
        """Write the whole status, unless the job is gone. Raises KubeConflict if it changed since, or was recreated."""
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
                # A precondition: a decision about an older version must not overwrite a newer one.
                **({"resourceVersion": job.resource_version} if job.resource_version else {}),
            },
            "status": status.to_document(),
        }
        try:
            self._cache.see(await self._api.apply_status(manifest))
        except errors.KubeNotFound as error:
            log.info("status_not_written", job=job.name, namespace=job.namespace, reason=error.message)

    # -- pods --------------------------------------------------------------------------------------------------

    async def _check(self, job: Job, action: plan.CheckTemplate, state: JobState) -> None:
        manifest = {**action.manifest, "metadata": {**action.manifest["metadata"]}}
        # A dry run with an existing name would fail because of the name.
        manifest["metadata"]["generateName"] = f"{manifest['metadata'].pop('name')}-"
        error = ""
        try:
            await self._api.create(manifest, is_dry_run=True)
        except errors.KubeRefused as refusal:
            if _OWN_RIGHTS in refusal.message:
                raise
            # A quota says nothing about the template; the creation itself will report it.
            if _kind_of(refusal) in (RefusalKind.INVALID, RefusalKind.FORBIDDEN):
                error = refusal.message
        except errors.KubeNotFound:
            pass  # the namespace is gone
        # Earlier templates are forgotten: one that comes back is checked again before it replaces a pod.
        templates = {job.templates.head, *map(job.templates.worker, job.spec.worker_groups)}
        state.verdicts = {name: verdict for name, verdict in state.verdicts.items() if name in templates}
        state.verdicts[action.template] = Verdict(error=error, at=self._clock(), generation=job.generation)

    async def _create_pod(self, job: Job, action: plan.CreatePod) -> None:
        name = action.manifest["metadata"]["name"]
        if self._cache.is_past(action.manifest):
            # The plan is outdated: its pod may have come and gone, and must not be created again.
            log.info("pod_not_created", pod=name, namespace=job.namespace, reason="its slot was filled meanwhile")
            return
        try:
            self._cache.see(await self._api.create(action.manifest))
        except errors.AlreadyExists:
            try:
                self._cache.see(await self._get_own(job, "Pod", name))
            except errors.KubeNotFound:
                self._cache.note_created(action.manifest)
            except errors.NameTaken as taken:
                if not taken.is_leaving:
                    raise
                # The head of an earlier job may drain for minutes. The next plan takes the next epoch.
                self._cache.note_created(action.manifest)
                log.info("pod_name_passed_over", pod=name, namespace=job.namespace)
        else:
            log.info("pod_created", pod=name, namespace=job.namespace)

    async def _delete(self, job: Job, action: plan.Delete) -> None:
        kind, name, uid = action.kind, action.name, action.uid
        try:
            left = await self._api.delete(kind, namespace=job.namespace, name=name, preconditions={"uid": uid})
        except (errors.KubeNotFound, errors.KubeConflict):
            # Others deleted it, and may have made another of its name.
            self._cache.forget(uid)
            return
        log.info("deleted", kind=kind, name=name, namespace=job.namespace, reason=action.why)
        if left.get("kind") == "Pod" and left["metadata"].get("deletionTimestamp"):
            self._cache.see(left)
        else:
            self._cache.forget(uid)

    async def _patch(self, job: Job, action: plan.Patch) -> None:
        kind, name, where = action.kind, action.name, {"namespace": job.namespace, "subresource": action.subresource}
        try:
            self._cache.see(await self._api.patch(kind, name=name, body=action.body, **where))
        except errors.KubeNotFound:
            self._cache.forget(action.uid)
        except errors.KubeConflict as error:
            # Others, such as Kueue, changed it meanwhile: the watch delivers the newer version for the next plan.
            log.debug("not_patched", kind=kind, name=name, namespace=job.namespace, reason=error.message)

    # -- other children ----------------------------------------------------------------------------------------

    async def _apply(self, job: Job, manifest: Manifest) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if (kind, name) not in self._cache.record(job.uid).children:
            # Objects of an earlier job are never adopted.
            with suppress(errors.KubeNotFound):
                await self._get_own(job, kind, name)
        try:
            self._cache.see(await self._api.apply(manifest))
        except errors.KubeNotFound as error:
            if kind not in _ABSENT_KINDS or "NamespaceTerminating" in error.causes:
                raise
            words = f"this cluster has no kind {kind}; {_ABSENT_KINDS[kind]}"
            raise errors.KubeRefused(
                403, {"reason": "NotFound", "message": words}, request=f"PATCH {kind} {name}"
            ) from error

    async def _read_queue_object(self, action: plan.ReadQueueObject, state: JobState) -> None:
        try:
            raw = await self._api.get(action.kind, namespace="", name=action.name)
        except errors.KubeNotFound as error:
            words = f"there is no {action.kind} {action.name}; create it"
            raise errors.KubeRefused(403, {"message": words}, request=f"GET {action.kind} {action.name}") from error
        if action.kind == "ResourceFlavor":
            state.flavors = {key: flavor for key, flavor in state.flavors.items() if key[1] == action.admission}
            state.flavors[action.name, action.admission] = read_flavor(raw)
        else:
            state.priorities[action.name] = raw["value"]

    async def _get_own(self, job: Job, kind: str, name: str) -> Manifest:
        own = await self._api.get(kind, namespace=job.namespace, name=name)
        if controller_uid(own) != job.uid:
            # Kubernetes will delete the object if its owner is a deleted job of this name.
            owners = own["metadata"].get("ownerReferences") or ()
            is_child = any(owner.get("kind") == KIND and owner.get("name") == job.name for owner in owners)
            is_leaving = is_child or own["metadata"].get("deletionTimestamp") is not None
            raise errors.NameTaken(f"{kind} {name}", is_leaving=is_leaving)
        return own

    async def _create_tokens(self, job: Job, action: plan.CreateTokens, state: JobState) -> None:
        """Create the token Secret, without permission to read or delete Secrets.

        The claim, a ConfigMap, proves later that the Secret is the job's own, even if the operator restarts between
        the two requests.
        """
        name = tokens_secret(job.name)
        try:
            await self._api.create(secret(job, self._key), is_dry_run=True)
        except errors.AlreadyExists as conflict:
            if action.claim is not None:
                # The operator may not read its owner. The Secret of an earlier job is deleted within seconds.
                before = state.refusals.get("Secret")
                is_new = before is None or (before.kind is RefusalKind.LEAVING and before.count < _LEAVING_LOOKS)
                raise errors.NameTaken(f"Secret {name}", is_leaving=is_new) from conflict
            if action.is_wrong:
                # Kubernetes deletes the Secret with its owner, and the next rejected poll recreates it. A Secret of an
                # earlier operator has no such owner.
                state.refused_since = self._clock()
                log.warning("token_rejected", secret=name, namespace=job.namespace)
                with suppress(errors.KubeNotFound, errors.NameTaken):
                    owner = (await self._get_own(job, "ConfigMap", name))["metadata"]
                    await self._api.delete(
                        "ConfigMap", namespace=job.namespace, name=name, preconditions={"uid": owner["uid"]}
                    )
        else:
            if action.claim is not None:
                await self._apply(job, action.claim)
            manifest = tokens_owner(job)
            try:
                owner = await self._api.create(manifest)
            except errors.AlreadyExists:
                owner = await self._get_own(job, "ConfigMap", manifest["metadata"]["name"])
            with suppress(errors.AlreadyExists):
                await self._api.create(secret(job, self._key, owner=owner))
        state.has_tokens = True

    async def _check_node(self, name: str, state: JobState) -> None:
        at = self._clock()
        try:
            fact = read_node(await self._api.get("Node", namespace="", name=name), at=at)
        except errors.KubeNotFound:
            fact = NodeFact(is_lost=True, at=at)
        except (errors.KubeRefused, errors.ServerFault) as error:
            # Unknown: treat the node as reachable, so that its pods keep their grace period.
            log.warning("node_not_seen", node=name, reason=error.message)
            fact = NodeFact(is_lost=False, at=at)
        state.nodes[name] = fact

    # -- the job and its head ----------------------------------------------------------------------------------

    async def _send_to_head(self, job: Job, action: plan.SetDesired | plan.DrainHead) -> None:
        try:
            if isinstance(action, plan.SetDesired):
                await self._heads.set_desired(job, action.pod, action.desired)
            else:
                await self._heads.drain(job, action.pod)
        except errors.HeadSilent as error:
            # The head's next answer shows that the command did not arrive; then it is sent again.
            log.warning("head_not_told", job=job.name, namespace=job.namespace, reason=str(error))

    async def _delete_job(self, job: Job) -> None:
        preconditions = {"uid": job.uid, "resourceVersion": job.resource_version}
        try:
            await self._api.delete(KIND, namespace=job.namespace, name=job.name, preconditions=preconditions)
            log.info("job_deleted", job=job.name, namespace=job.namespace, reason="ttlSecondsAfterFinished elapsed")
        except (errors.KubeNotFound, errors.KubeConflict):
            return


def _kind_of(error: errors.KubeError, *, is_creation: bool = True) -> RefusalKind:
    """Classify a refusal, by the phrases of the API server's admission plugins."""
    if isinstance(error, errors.ServerFault):
        return RefusalKind.SERVER
    if isinstance(error, errors.KubeNotFound) or "NamespaceTerminating" in error.causes:
        return RefusalKind.NAMESPACE
    if not is_creation:
        return RefusalKind.FORBIDDEN
    if error.code == 403:
        if "exceeded quota: " in error.message or "failed quota: " in error.message:
            return RefusalKind.QUOTA
        return RefusalKind.INVALID if "violates PodSecurity" in error.message else RefusalKind.FORBIDDEN
    return RefusalKind.INVALID

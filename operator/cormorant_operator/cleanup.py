"""What is left of a job that ended: pods as cleanPodPolicy says, and the job itself until its time is over."""

from cormorant_operator.plan import Action, DeleteJob, DeletePod, Plan
from cormorant_operator.view import View


def clean_up(view: View) -> Plan:
    """Decide about a job whose end is written in its status. Nothing of it is ever created again."""
    status, policy = view.job.status, view.policy
    finished, ttl_s = status.completion_time, policy.ttl_seconds_after_finished
    over = view.after(finished, ttl_s) if finished is not None and ttl_s is not None else None
    if over is not None and view.now >= over:
        return Plan(actions=(DeleteJob(),))
    actions: list[Action] = []
    for pod in view.observed.pods:
        if pod.is_terminating or policy.clean_pod_policy == "None":
            continue
        # A head that ended keeps its log; one that still runs keeps a node busy for nothing.
        if pod.role != "head" or policy.clean_pod_policy == "All" or not pod.is_terminal or pod.has_sidecar:
            actions.append(DeletePod(pod=pod, why="the job is over"))
    return Plan(actions=tuple(actions), due=over)

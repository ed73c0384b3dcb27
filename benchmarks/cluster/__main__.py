"""`python -m benchmarks.cluster`: what the operator costs a cluster and how quick it is, against its targets.

It needs an API server (KUBECONFIG, cluster-admin) and kubectl, and room for its pods: nodes with the label `type=fake`
whose pods become ready by KWOK. With --play-kubelet no node is needed: it writes the pods' statuses itself, and no
scheduler looks at them. Heads are played by a stub. It works in a namespace of its own, which it deletes.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from ipaddress import ip_network
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.cluster import figures
from benchmarks.cluster.addresses import allow_many_connections
from benchmarks.cluster.api import Api, Kubelet, PodWatch
from benchmarks.cluster.figures import Bench, Figure
from benchmarks.cluster.process import Operator, stub_heads
from benchmarks.contenders import ROOT
from cormorant_cli.app import crd_yaml
from cormorant_contract.schema import crd as crd_document

CRD_TARGET_KB = 64
PODS_PER_NODE = 250
SERVICES_PER_JOB = 2


def main() -> int:
    """Returns 0 when every target is met, 1 when one is missed, 2 when it could not run."""
    # One that is told to end cleans up after itself, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    allow_many_connections()
    args, console = _parse(), Console()
    if trouble := _trouble(args):
        console.print(f"[red]{trouble}[/]")
        return 2
    results: dict[str, Any] = {"machine": report.machine(), "arguments": {k: str(v) for k, v in vars(args).items()}}
    rows = [_crd()]
    with (
        _namespace(console, is_left=args.leave) as namespace,
        stub_heads() as port,
        tempfile.TemporaryDirectory() as folder,
    ):
        try:
            asyncio.run(_measure(args, console, rows, namespace, port, Path(folder)))
        finally:
            # Before the namespace is deleted: that takes minutes, and may fail.
            console.print(_table(rows))
            results["figures"] = [{**asdict(row), "is_met": row.is_met} for row in rows]
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(results, indent=1))
            console.print(f"written to {args.json}", highlight=False, soft_wrap=True)
    return 0 if all(row.is_met for row in rows) else 1


async def _measure(
    args: argparse.Namespace, console: Console, rows: list[Figure], namespace: str, port: int, folder: Path
) -> None:
    # Played pods have addresses of this machine, as KWOK's have not.
    host = "{ip}" if args.play_kubelet else "127.0.0.1"
    operator = Operator(namespace=namespace, head_url=f"http://{host}:{port}/{{namespace}}/{{job}}", folder=folder)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(Api(namespace))
        pods = await stack.enter_async_context(PodWatch(api))
        if args.play_kubelet:
            await stack.enter_async_context(Kubelet(api, pods))
        stack.enter_context(operator)
        bench = Bench(
            api=api,
            pods=pods,
            operator=operator,
            head_port=port,
            namespace=namespace,
            settle_s=args.settle_seconds,
            is_played=args.play_kubelet,
        )
        steps: dict[str, Callable[[], Coroutine[Any, Any, list[Figure]]]] = {
            "creation": lambda: figures.creation(bench, workers=args.many_workers, rounds=args.rounds),
            "standing": lambda: figures.standing(
                bench, jobs=args.jobs, workers=args.workers, samples=args.samples, window_s=args.window_seconds
            ),
            "restart": lambda: figures.restart(bench, jobs=args.jobs, watch_s=min(30.0, args.window_seconds)),
        }
        for name, step in steps.items():
            began = time.monotonic()
            try:
                rows += await step()
            except Exception:
                console.print(
                    f"[red]{name} broke off[/]; the operator's last words:\n{operator.log.read_text()[-3000:]}"
                )
                raise
            console.print(f"{name}: {time.monotonic() - began:.0f} s", highlight=False)


def _crd() -> Figure:
    stored = json.dumps(crd_document(), separators=(",", ":")).encode()
    return Figure(what="CRD", value=len(stored) / 1024, unit="KB", target=CRD_TARGET_KB)


@contextmanager
def _namespace(console: Console, *, is_left: bool) -> Iterator[str]:
    name = f"cormorant-bench-{uuid4().hex[:6]}"
    apply = ["kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-"]
    subprocess.run(apply, input=crd_yaml().encode(), check=True, timeout=60, stdout=subprocess.DEVNULL)
    established = ["wait", "--for=condition=Established", "--timeout=30s", "crd/collectorjobs.cormorant.dev"]
    subprocess.run(["kubectl", *established], check=True, timeout=60, stdout=subprocess.DEVNULL)
    subprocess.run(["kubectl", "create", "namespace", name], check=True, timeout=60, stdout=subprocess.DEVNULL)
    try:
        yield name
    finally:
        delete = ["kubectl", "delete", "namespace", name, "--timeout=600s"]
        if not is_left and subprocess.run(delete, check=False, timeout=660, stdout=subprocess.DEVNULL).returncode:
            console.print(f"[red]namespace {name} is not gone yet; see kubectl get namespace {name}[/]")


def _trouble(args: argparse.Namespace) -> str:
    """Why it cannot run; empty: it can."""
    if args.play_kubelet:
        return _address_trouble(args)
    ask = ["kubectl", "get", "nodes", "-l", "type=fake", "-o", "name"]
    shown = subprocess.run(ask, check=False, capture_output=True, text=True, timeout=60)
    if shown.returncode:
        return f"the API server does not answer: {shown.stderr.strip()}"
    pods = (args.workers + 1) * args.jobs
    nodes, needed = len(shown.stdout.split()), -(-pods // PODS_PER_NODE)
    if nodes < needed:
        return (
            f"{pods} pods need {needed} nodes with the label type=fake, of {PODS_PER_NODE} pods each, and there are "
            f"{nodes}; add nodes, ask for fewer --jobs, or use --play-kubelet for a few"
        )
    return _address_trouble(args)


def _address_trouble(args: argparse.Namespace) -> str:
    # Kubernetes of before 1.33 does not tell.
    ask = ["kubectl", "get", "servicecidrs", "-o", "jsonpath={.items[*].spec.cidrs[*]}"]
    shown = subprocess.run(ask, check=False, capture_output=True, text=True, timeout=60)
    addresses = sum(ip_network(cidr).num_addresses for cidr in shown.stdout.split())
    if not shown.returncode and addresses < (needed := SERVICES_PER_JOB * args.jobs + 16):
        return (
            f"{args.jobs} jobs need {needed} Service addresses and the cluster has {addresses}; "
            "create a ServiceCIDR beside the ones that kubectl get servicecidrs shows, or ask for fewer --jobs"
        )
    return ""


def _table(rows: list[Figure]) -> Table:
    table = Table(title="operator", title_justify="left", title_style="bold")
    for column in ("what", "measured", "unit", "target", ""):
        table.add_column(column, justify="right" if column in ("measured", "target") else "left")
    for row in rows:
        target = f"<= {row.target:g}" if row.target is not None else ""
        mark = "" if row.target is None else "[green]met[/]" if row.is_met else "[red]missed[/]"
        table.add_row(row.what, f"{row.value:.2f}", row.unit, target, f"{mark} {row.details}")
    return table


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few small jobs and short looks: does it run?")
    parser.add_argument("--play-kubelet", action="store_true", help="write the pods' statuses; no node is needed")
    parser.add_argument("--leave", action="store_true", help="do not delete the namespace: the cluster is thrown away")
    parser.add_argument("--jobs", type=int, help="that run at once; default 1000, with --quick 5")
    parser.add_argument("--workers", type=int, help="of each of them; default 9, with --quick 3")
    parser.add_argument("--samples", type=int, help="workers that are deleted; default 60, with --quick 5")
    parser.add_argument("--many-workers", type=int, help="of the large job; default 100, with --quick 10")
    parser.add_argument("--rounds", type=int, help="of the large job; default 3, with --quick 1")
    parser.add_argument("--window-seconds", type=float, help="of a look at the load; default 300, with --quick 20")
    parser.add_argument("--settle-seconds", type=float, default=900.0, help="for jobs to run, at most")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "benchmarks" / "results" / f"operator-{time.strftime('%Y%m%d-%H%M%S')}.json"
    )
    args = parser.parse_args()
    defaults = {
        "jobs": (1000, 5),
        "workers": (9, 3),
        "samples": (60, 5),
        "many_workers": (100, 10),
        "rounds": (3, 1),
        "window_seconds": (300.0, 20.0),
    }
    for name, (full, quick) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    return args


if __name__ == "__main__":
    sys.exit(main())

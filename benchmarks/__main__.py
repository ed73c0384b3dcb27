"""`python -m benchmarks`: this project against the bare loop and against its peers, in one run. See README.md."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks import report
from benchmarks.contenders import CONTENDERS, PEERS_PYTHON, ROOT, YARDSTICKS, Contender
from benchmarks.micro.run import MICRO, run_micro
from benchmarks.runner import run_workload
from benchmarks.workloads import WORKLOADS

QUICK_WORKLOADS = ("cartpole-8", "cartpole-64", "random-cartpole-64")


def main() -> None:
    # A run that is told to end (timeout, CI) ends its contenders too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = _parse()
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # 80 would break the columns
    results: dict = {"machine": report.machine(), "rounds": args.rounds, "workloads": {}, "micro": {}}
    load = results["machine"]["load_average_before"]
    if load > 0.25 * results["machine"]["cores"]:
        console.print(f"[yellow]load average {load:.1f}: other work is running, the figures will be noisy[/]")
    started = time.monotonic()
    with console.status("") as status:
        for name in _workloads(args):
            outcomes = run_workload(
                _contenders(args, name), name, rounds=args.rounds, seconds=args.seconds, say=_shower(console, status)
            )
            results["workloads"][name] = report.workload_to_json(outcomes)
            report.print_workload(console, name, results["workloads"][name])
            _write(args.json, results)
        for name in MICRO:
            if not args.only or name in args.only:
                status.update(name)
                results["micro"][name] = run_micro(name, quick=args.quick)
    if results["micro"]:
        report.print_micro(console, results["micro"])
    results["minutes"] = (time.monotonic() - started) / 60
    _write(args.json, results)
    console.print(f"{results['minutes']:.1f} minutes; written to {args.json}", highlight=False, soft_wrap=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of a few workloads: does it run?")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        choices=[*WORKLOADS, *MICRO],
        help=f"may be given again; one of {', '.join([*WORKLOADS, *MICRO])}",
    )
    parser.add_argument("--contender", action="append", metavar="TEXT", help="only contenders with TEXT in their name")
    parser.add_argument("--rounds", type=int, default=0, help="default 5, with --quick 1")
    parser.add_argument("--seconds", type=float, default=0.0, help="of one measurement; default 1, with --quick 0.5")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "benchmarks" / "results" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.seconds = args.seconds or (0.5 if args.quick else 1.0)
    return args


def _workloads(args: argparse.Namespace) -> list[str]:
    if args.only:
        return [name for name in WORKLOADS if name in args.only]
    return list(QUICK_WORKLOADS if args.quick else WORKLOADS)


def _contenders(args: argparse.Namespace, workload: str) -> list[Contender]:
    """What everyone is compared with, and who else takes part in this run."""
    family = "random" if WORKLOADS[workload].policy == "random" else "policy"
    wanted = [contender for contender in CONTENDERS if family in contender.families]
    if args.quick and not args.contender:
        wanted = [contender for contender in wanted if contender.in_quick]
    if args.contender:
        wanted = [
            c for c in wanted if c in YARDSTICKS or any(text.lower() in c.name.lower() for text in args.contender)
        ]
    if not PEERS_PYTHON.exists():
        wanted = [contender for contender in wanted if contender.python != PEERS_PYTHON]
    return wanted


def _shower(console: Console, status: object) -> Callable[[str], None]:
    """Progress in the status line; nothing in a pipe, where it would only fill a log."""
    return status.update if console.is_terminal else lambda message: None


def _write(path: Path, results: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

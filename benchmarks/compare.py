"""genba beside its peers, in one run: `make bench`, or

    .venv/bin/python benchmarks/compare.py --quick          few of everything: shows that it works, not how fast
    .venv/bin/python benchmarks/compare.py --only huey,rq   some of the peers; genba and the limit are always there
    .venv/bin/python benchmarks/compare.py --write          puts the table and the chart into docs/

Each peer is installed into an environment of its own under build/peers.  A peer that cannot run here is named with the
reason.  In each round every workload meets all contenders in turns, in an order of its own; medians are told.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

from beside.installing import Adapter, Unavailable, adapters
from beside.report import lines, write
from beside.results import Results
from beside.services import Services
from beside.stage import Contender, Wrong
from beside.workloads import LONG, WORKLOADS, Plan
from measure.limits import raw

LIMITED = ("drain", "drain-1")  # workloads that stand beside the raw limit


def main() -> int:
    asked = _asked()
    if asked.list:
        for adapter in adapters():
            print(
                f"{adapter.name:16} {adapter.title}, on {', '.join(adapter.on)}: {adapter.settings}"
            )
        return 0
    signal.signal(
        signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum)
    )  # what was started ends with us
    plan = Plan.quick() if asked.quick else Plan()
    given = {"backlog": asked.backlog, "rounds": asked.rounds}
    plan = replace(plan, **{name: value for name, value in given.items() if value})
    workloads = _words(asked.workloads) or [name for name in WORKLOADS if name not in LONG]
    results = Results(plan=plan)
    began = time.monotonic()
    with ExitStack() as stack:
        services = Services(stack)
        contenders = _contenders(_words(asked.only), _words(asked.on), services, results)
        for turn in range(plan.rounds):
            for name in workloads:
                if name in LIMITED:
                    _limits({one.on for one in contenders}, services, plan, results)
                for contender in random.Random(f"{name} {turn}").sample(
                    contenders, len(contenders)
                ):
                    if not results.is_absent(contender, name):
                        _measure(contender, name, services, plan, results, turn)
    results.seconds = time.monotonic() - began
    results.store()
    print("\n".join(lines(results)))
    if asked.write:
        write(results)
    without_us = [title for title in results.absent if title.startswith("genba (")]
    return 1 if results.wrong or without_us else 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true", help="who there is, and how each is run")
    parser.add_argument("--only", metavar="PEER,…", help="names of files in benchmarks/peers")
    parser.add_argument(
        "--on", metavar="NAME,…", help="sqlite, postgres, redis, rabbitmq; by default all"
    )
    some = f"{', '.join(WORKLOADS)}; by default all but {', '.join(LONG)}"
    parser.add_argument("--workloads", metavar="NAME,…", help=some)
    parser.add_argument("--backlog", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--write", action="store_true", help="docs/explanation/peers.md and docs/peers.svg"
    )
    return parser.parse_args()


def _words(text: str | None) -> list[str]:
    return text.split(",") if text else []


def _contenders(
    only: list[str], services_only: list[str], services: Services, results: Results
) -> list[Contender]:
    ready = []
    for adapter in adapters():
        if not only or adapter.is_ours or adapter.name in only:
            wanted = [on for on in adapter.on if not services_only or on in services_only]
            ready += [one for on in wanted if (one := _ready(adapter, on, services, results))]
    return ready


def _ready(adapter: Adapter, on: str, services: Services, results: Results) -> Contender | None:
    contender = Contender(adapter, on)
    _say(f"installing {contender.title}")
    try:
        adapter.install()
        services.fresh(on)
        results.peers[contender.title] = (contender, adapter.version)
    except Unavailable as reason:
        results.absent[contender.title] = str(reason)
        return None
    return contender


def _limits(engines: set[str], services: Services, plan: Plan, results: Results) -> None:
    """The raw loop on a bare table, once for each drain; its first pass does not count."""
    for on in ("sqlite", "postgres"):
        if on in engines:
            with services.fresh(on)() as url, raw(url) as plain:
                plain.drain(plan.backlog // 3)
                results.limits[on].append(plain.drain(plan.backlog))


def _measure(
    contender: Contender, name: str, services: Services, plan: Plan, results: Results, turn: int
) -> None:
    _say(f"round {turn + 1} of {plan.rounds}: {name}, {contender.title}")
    try:
        figures = WORKLOADS[name](contender, services, plan)
    except Unavailable as reason:
        results.absent[contender.title if name == "drain" else f"{contender.title}, {name}"] = str(
            reason
        )
    except Wrong as fault:
        results.wrong.append(f"{contender.title}, {name}, round {turn + 1}: {fault}")
    else:
        for figure, value in figures.items():
            results.add(contender, figure, value)
        _say("  " + ", ".join(f"{figure} {value:,.1f}" for figure, value in figures.items()))


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""All that can go wrong, at least once in each run, while 2,000 jobs run; out of a seed (fire.py).

`make soak` plays twenty seeds of 10,000 jobs and 200 faults, with an outage of a minute in each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.fire import EVERYWHERE, LEASE, Disk, Fire, Kind, Way, load, plan
from tests.chaos.network import Network, Proxy, no_network_of_our_own
from tests.support import NodeProcess, sqlite_url
from tests.support.postgres_server import a_server


@dataclass
class Site:
    """A database, how its nodes are started, and what can happen to it besides."""

    app: Any
    starts: list[Callable[[], NodeProcess]]
    kinds: dict[str, Kind]


@pytest.fixture
def site(
    engine: str,
    start_node: Callable[..., NodeProcess],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Site]:
    def node(url: str) -> NodeProcess:
        return start_node(
            "fire:app", url, "--pool", "static", "--min", "2", env={"GENBA_LEASE": str(LEASE)}
        )

    with ExitStack() as stack:
        if engine == "sqlite":
            place, kinds = tmp_path, {}
            if os.geteuid() == 0:
                disk = Disk(tmp_path / "disk")
                stack.callback(disk.close)
                place, kinds = disk.folder, disk.kinds
            url = sqlite_url(place)
            starts = [lambda: node(url)] * 2
        else:
            server = stack.enter_context(a_server())
            url = server.url
            network = None if no_network_of_our_own() else Network()
            if network:
                stack.callback(network.close)
            proxy = Proxy(url, network.listen() if network else None)
            stack.callback(proxy.close)

            def far() -> NodeProcess:
                if network is None:
                    return node(proxy.url)
                with network.at_node():
                    return node(proxy.url)

            starts = [lambda: node(url), far]
            kinds = Way(server, proxy, network, outage=request.param).kinds
        app = load(url, tmp_path)
        stack.callback(app.app.close)
        app.app.count()  # makes the tables: two nodes that do it at a time are another test
        yield Site(app, starts, {**EVERYWHERE, **kinds})


EACH = pytest.mark.parametrize(
    ("site", "seed", "jobs", "faults"),
    [
        *((3, seed, 2_000, 0) for seed in (1, 2, 3)),
        *(pytest.param(60, seed, 10_000, 200, marks=pytest.mark.soak) for seed in range(100, 120)),
    ],
    indirect=["site"],
)


def play(site: Site, folder: Path, seed: int, jobs: int, faults: int) -> None:
    fire = Fire(seed, site.app, folder, site.starts, site.kinds)

    fire.burn(jobs, plan(seed, list(site.kinds), faults))

    fire.check()
    assert fire.hits.keys() == site.kinds.keys()
    print(
        f"seed {seed}: {jobs} jobs, {fire.hits.total()} faults, {fire.repeated} jobs ran again, "
        f"{fire.late} ended too late"
    )
    if missed := fire.missed():
        pytest.skip(f"nothing was lost or doubled; did not happen in this run: {', '.join(missed)}")


@EACH
@pytest.mark.parametrize("engine", ["sqlite"])  # the other: test_fire_postgres.py
def test_whatever_goes_wrong_with_real_processes_nothing_is_lost_or_doubled(
    site, tmp_path, seed, jobs, faults
):
    play(site, tmp_path, seed, jobs, faults)

"""docs/howto/kubernetes.md: what its manifests name is there, and its times fit together."""

from __future__ import annotations

import json
import re
from http import HTTPStatus

import click
from tests.support import ROOT

from genba.cli import main
from genba.domain.duration import duration
from genba.node.watch.counters import Counters
from genba.node.watch.http import MetricsServer
from genba.node.watch.metrics import NodeStatus, text
from genba.storage.jobs.counts import OpenJobCounts, StateCount

DOCUMENT = (ROOT / "docs" / "howto" / "kubernetes.md").read_text()


def test_the_command_of_the_pod_is_one_that_a_node_understands():
    (line,) = re.findall(r"command: (\[.*\])", DOCUMENT)
    genba, *words = json.loads(line)
    node = main.commands["node"]
    assert isinstance(node, click.Group)
    start = node.commands["start"]

    parsed = start.make_context("start", words[2:], resilient_parsing=False)

    assert (genba, words[:2], parsed.params["target"]) == ("genba", ["node", "start"], "tasks:app")
    (longest,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", DOCUMENT)
    assert int(longest) * 1_000_000 >= duration(parsed.params["grace"]) + 10_000_000
    (port,) = re.findall(r"containerPort: (\d+)", DOCUMENT)
    assert parsed.params["metrics"].endswith(f":{port}")


def test_every_probe_and_every_metric_is_documented():
    port = MetricsServer(("127.0.0.1", 0), "n1", 2)
    try:
        for path in re.findall(r"path: (/\w+)", DOCUMENT):
            assert port.answer(path)[0] != HTTPStatus.NOT_FOUND
    finally:
        port.close()
    watch = (ROOT / "docs" / "howto" / "telemetry.md").read_text()
    exported = text(
        NodeStatus("n1"),
        Counters(),
        OpenJobCounts(0, [StateCount("waiting", "default", "t", 1, 0)], frozenset(), 0, 0, None),
    )
    for metric in re.findall(r"genba_\w+", DOCUMENT + watch):
        assert f"# TYPE {metric} " in exported
    for metric in re.findall(r"# TYPE (\w+) ", exported):
        assert f"`{metric}" in watch

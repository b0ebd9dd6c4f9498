"""A node as a service: what `genba unit` prints is what systemd and supervisor understand."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from tests.support import eventually, load_jobs, sqlite_url, without_settings

from genba.cli import main

# seeds/lzq.txt lists these for its program
FIELDS = (
    *(
        "command",
        "process_name",
        "numprocs",
        "autostart",
        "autorestart",
        "startsecs",
        "startretries",
        "stopsignal",
    ),
    *(
        "stopwaitsecs",
        "redirect_stderr",
        "stdout_logfile",
        "stdout_logfile_maxbytes",
        "stdout_logfile_backups",
    ),
    *("stderr_logfile", "stderr_logfile_maxbytes", "stderr_logfile_backups"),
)


def unit(*words: str, cwd: Path) -> str:
    ran = CliRunner(env={"GENBA_URL": None}).invoke(
        main, ["unit", *words[:2], "--folder", str(cwd), *words[2:]]
    )
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def test_a_supervisor_section_has_every_field(tmp_path):
    text = unit(
        "supervisor",
        "shop.jobs:app",
        "--url",
        "sqlite:////srv/a%20b.db",
        "--user",
        "shop",
        cwd=tmp_path,
    )
    read = configparser.RawConfigParser()
    read.read_string(text)

    section = dict(read["program:genba-shop-jobs"])
    assert set(FIELDS) <= section.keys()
    assert section["stopsignal"] == "TERM"
    assert section["stopwaitsecs"] == "35"
    assert section["user"] == "shop"
    assert 'GENBA_URL="sqlite:////srv/a%%20b.db"' in section["environment"]


@pytest.mark.parametrize("kind", ["systemd", "supervisor"])
def test_a_password_stays_out_of_the_file(kind, tmp_path):
    text = unit(kind, "jobs:app", "--url", "postgresql://ann:secret@db/shop", cwd=tmp_path)

    assert "secret" not in text
    assert "GENBA_URL" in text  # where it belongs is said


def systemd_unit(folder: Path) -> str:
    folder.mkdir()
    return unit(
        "systemd",
        "jobs:app",
        "--url",
        "sqlite:////srv/50%.db",
        "--",
        "--name",
        'a $b "c"',
        cwd=folder,
    )


def test_what_means_something_to_systemd_is_quoted_in_its_unit(tmp_path):
    text = systemd_unit(tmp_path / "my shop")

    assert f"WorkingDirectory={tmp_path / 'my shop'}" in text
    assert "Environment=GENBA_URL=sqlite:////srv/50%%.db" in text
    assert '"a $$b \\"c\\""' in text
    assert re.search(r"^KillMode=mixed$", text, re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_its_unit(tmp_path):
    path = tmp_path / "genba-jobs.service"
    path.write_text(systemd_unit(tmp_path / "my shop"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in checked.stderr.splitlines() if path.name in line]
    assert complaints == []


def test_supervisord_starts_stops_and_starts_again_what_was_printed(tmp_path):
    jobs = load_jobs(sqlite_url(tmp_path), tmp_path)
    section = unit(
        "supervisor",
        "jobs:app",
        "--name",
        "shop",
        "--processes",
        "2",
        "--logs",
        str(tmp_path),
        "--grace",
        "5s",
        "--url",
        jobs.app.url,
        "--",
        "--max",
        "1",
        cwd=tmp_path,
    )
    conf = tmp_path / "supervisord.conf"
    conf.write_text(
        f"[supervisord]\nlogfile={tmp_path}/supervisord.log\npidfile={tmp_path}/pid\n{section}"
    )
    daemon = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "supervisor.supervisord", "-n", "-c", str(conf)],
        cwd=tmp_path,
        env=without_settings(os.environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def others(than: int) -> list[int]:
        return [node.pid for node in jobs.app.nodes() if node.pid != than]

    try:
        eventually(lambda: len(jobs.app.nodes()) == 2, within=60)
        assert jobs.add.enqueue(1, 2).result(timeout=60) == 3

        killed = jobs.app.nodes()[0].pid
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(others(killed)) == 2, within=60)
        family = psutil.Process(daemon.pid).children(recursive=True)

        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0
        assert others(killed) == []  # both have drained, and said so
        eventually(lambda: not any(one.is_running() for one in family), within=20)
    finally:
        daemon.kill()
        daemon.wait()
        jobs.app.close()

"""What tests share: apps, nodes and commands as processes, databases, and waiting for them."""

from tests.support.apps import APPS, ROOT, load_app, load_jobs, load_module
from tests.support.command_line import (
    genba_command,
    own_pid_namespace,
    run_genba,
    run_python,
    without_settings,
)
from tests.support.databases import Databases, sqlite_url
from tests.support.job_files import lines, started
from tests.support.node_process import NodeProcess
from tests.support.waiting import PATIENCE, ended, eventually, gone, reaped

__all__ = [
    "APPS",
    "PATIENCE",
    "ROOT",
    "Databases",
    "NodeProcess",
    "ended",
    "eventually",
    "genba_command",
    "gone",
    "lines",
    "load_app",
    "load_jobs",
    "load_module",
    "own_pid_namespace",
    "reaped",
    "run_genba",
    "run_python",
    "sqlite_url",
    "started",
    "without_settings",
]

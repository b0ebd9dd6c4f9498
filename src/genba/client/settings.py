"""Settings: from `[tool.genba]` of the project, then GENBA_*, then arguments; later wins."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from genba.domain.duration import Micros, duration
from genba.domain.liveness import DEFAULT_LEASE_US
from genba.domain.rank import AGE_STEP
from genba.errors import BadOption
from genba.options.parse import NAME_PATTERN

NAMES = ("url", "namespace", "lease", "tz", "age_step", "keep_events", "max_events")
NODE_NAMES = (
    "queues",
    "pool",
    "min",
    "max",
    "grace",
    "max_dedicated",
    "recycle_after",
    "max_load",
    "min_free_memory",
    "metrics",
    "log_format",
    "log_jobs",
)


@dataclass(frozen=True, slots=True)
class Settings:
    url: str = field(default="sqlite:///genba.db", repr=False)  # it may have a password
    namespace: str = "default"
    lease: Micros = DEFAULT_LEASE_US
    tz: str = "UTC"
    age_step: Micros = AGE_STEP
    keep_events: Micros = 7 * 86_400_000_000
    max_events: int = 5_000_000

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.tz)


def read(
    arguments: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """Read the settings from all three places; BadOption names the place of a wrong one."""
    environ = os.environ if environ is None else environ
    settings = Settings()
    project = {name: value for name, value in _project(folder).items() if name != "node"}
    variables = {name: environ.get(f"GENBA_{name.upper()}") for name in NAMES}
    layers: list[tuple[str, Mapping[str, Any]]] = [
        ("[tool.genba]", project),
        ("the environment", {name: value for name, value in variables.items() if value}),
        ("Genba(…)", {name: value for name, value in arguments.items() if value is not None}),
    ]
    for place, values in layers:
        for name, value in values.items():
            settings = _with(settings, place, name, value)
    return settings


def read_node(
    environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """Return what `[tool.genba.node]` and GENBA_NODE_* say, as it is written there."""
    environ = os.environ if environ is None else environ
    table = _project(folder).get("node", {})
    unknown = [name for name in table if name not in NODE_NAMES]
    if unknown:
        raise BadOption(
            f"[tool.genba.node]: there is no setting {unknown[0]!r}; "
            f"there are {', '.join(NODE_NAMES)}"
        )
    variables = {name: environ.get(f"GENBA_NODE_{name.upper()}") for name in NODE_NAMES}
    return {**table, **{name: value for name, value in variables.items() if value}}


def _project(folder: Path | None) -> Mapping[str, Any]:
    path = (folder or Path.cwd()) / "pyproject.toml"
    try:
        table: Mapping[str, Any] = tomllib.loads(path.read_text()).get("tool", {}).get("genba", {})
    except OSError:
        return {}
    except tomllib.TOMLDecodeError as error:
        raise BadOption(f"{path} cannot be read: {error}") from error
    return table


def _with(settings: Settings, place: str, name: str, value: Any) -> Settings:
    if name not in NAMES:
        raise BadOption(f"{place}: there is no setting {name!r}; there are {', '.join(NAMES)}")
    known = {field: getattr(settings, field) for field in NAMES}
    try:
        known[name] = _READERS[name](value)
    except (BadOption, ValueError, TypeError, ZoneInfoNotFoundError) as error:
        raise BadOption(f"{place}: {name} = {value!r}: {error}") from error
    return Settings(**known)


def _namespace(value: Any) -> str:
    if not isinstance(value, str) or not NAME_PATTERN.fullmatch(value):
        raise BadOption("a namespace is a letter or _, then letters, digits, _ . : # -")
    return value


def _duration(value: Any) -> Micros:
    """Read a duration; a number may be a text, as it is in the environment."""
    return duration(
        float(value) if isinstance(value, str) and value.replace(".", "", 1).isdigit() else value
    )


def _age_step(value: Any) -> Micros:
    micros = _duration(value)
    if micros < 1:
        raise BadOption("age_step must be positive: it is the time that one priority is worth")
    return micros


def _lease(value: Any) -> Micros:
    micros = _duration(value)
    if micros < 1_000_000:
        raise BadOption("a lease must be at least 1 s: with less, healthy nodes count as dead")
    return micros


def _max_events(value: Any) -> int:
    if isinstance(value, bool) or int(value) < 1:
        raise BadOption("at least 1 event must be kept")
    return int(value)


_READERS: dict[str, Any] = {
    "url": str,
    "namespace": _namespace,
    "lease": _lease,
    "tz": lambda v: ZoneInfo(v).key,
    "age_step": _age_step,
    "keep_events": duration,
    "max_events": _max_events,
}

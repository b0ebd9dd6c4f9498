"""The worker pool of a node: its kind, and its smallest and largest number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from genba.errors import BadOption

POOLS = ("dynamic", "static", "ondemand")
CHANGEABLE_SETTINGS = ("pool", "min", "max")  # while the node runs


class PoolSettings(msgspec.Struct, frozen=True):
    """The pool settings stored in a node's row; unknown values do not restrict anything."""

    pool: str = "dynamic"
    min: int = 0
    max: int = 2**31 - 1


def check_pool(pool: str, minimum: int, maximum: int) -> None:
    """Raise BadOption for settings that do not fit together."""
    if pool not in POOLS:
        raise BadOption(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
    for name, value in (("min", minimum), ("max", maximum)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadOption(f"{name} must be a whole number, got {value!r}")
    if minimum < 0 or maximum < 1:
        raise BadOption(
            f"min must be at least 0 and max at least 1, got min={minimum} and max={maximum}"
        )
    if pool == "static" and minimum < 1:
        raise BadOption("a static pool runs min workers: min must be at least 1, got 0")
    if pool == "dynamic" and minimum > maximum:
        raise BadOption(f"min must not be greater than max, got min={minimum} and max={maximum}")


def check_changes(changes: Mapping[str, Any]) -> None:
    """Raise BadOption for settings that a running node cannot change."""
    unknown = changes.keys() - set(CHANGEABLE_SETTINGS)
    if unknown:
        raise BadOption(
            f"{', '.join(sorted(unknown))} cannot be changed while the node runs; "
            f"these can: {', '.join(CHANGEABLE_SETTINGS)}"
        )

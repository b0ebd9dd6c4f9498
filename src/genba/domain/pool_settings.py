"""How many workers a node has, and how they come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from genba.errors import BadOption

POOLS = ("dynamic", "static", "ondemand")
CHANGEABLE_SETTINGS = ("pool", "min", "max")  # while the node runs


class PoolSettings(msgspec.Struct, frozen=True):
    """What is known of a node's pool; what is not stands in nobody's way."""

    pool: str = "dynamic"
    min: int = 0
    max: int = 2**31 - 1


def check_pool(pool: str, least: int, most: int) -> None:
    """BadOption, if that makes no sense."""
    if pool not in POOLS:
        raise BadOption(f"pool must be one of {', '.join(POOLS)}, not {pool!r}")
    for name, value in (("min", least), ("max", most)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadOption(f"{name} must be a whole number, not {value!r}")
    if least < 0 or most < 1:
        raise BadOption(f"a pool has at least 0 (min) and 1 (max) workers, not {least} and {most}")
    if pool == "static" and least < 1:
        raise BadOption("a static pool runs min workers: min must be at least 1")
    if pool == "dynamic" and least > most:
        raise BadOption(f"min ({least}) is greater than max ({most})")


def check_changes(changes: Mapping[str, Any]) -> None:
    unknown = changes.keys() - set(CHANGEABLE_SETTINGS)
    if unknown:
        raise BadOption(
            f"{', '.join(sorted(unknown))} cannot be changed; only {', '.join(CHANGEABLE_SETTINGS)}"
        )

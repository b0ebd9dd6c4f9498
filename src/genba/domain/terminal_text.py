"""Texts that cannot steer a terminal, however they came about."""

from __future__ import annotations

import re

# C0, DEL and C1 steer a terminal; the rest turns text around, breaks lines, or cannot be written at all.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: object, *, lines: bool = False) -> str:
    """A text that cannot steer the terminal; with `lines` it keeps its line ends and tabs."""
    return _CONTROL.sub(lambda m: m[0] if lines and m[0] in "\n\t" else _escaped(m[0]), str(text))


def clean_json(text: str) -> str:
    """The same for JSON, which stays what it was."""
    return _CONTROL.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", errors="surrogatepass").decode()

"""Escape control characters, so that a text cannot steer a terminal."""

from __future__ import annotations

import re

# C0, DEL and C1 steer a terminal; the others reverse text, break lines, or cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: object, *, lines: bool = False) -> str:
    """Escape the control characters of a text; with `lines`, keep line ends and tabs."""
    return _CONTROL.sub(lambda m: m[0] if lines and m[0] in "\n\t" else _escaped(m[0]), str(text))


def clean_json(text: str) -> str:
    """Escape the control characters of a JSON text, so that its value stays the same."""
    return _CONTROL.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", errors="surrogatepass").decode()

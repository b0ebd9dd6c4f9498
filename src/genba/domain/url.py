"""Database URLs: split them, and hide their passwords however badly they are written."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, unquote, urlsplit

from genba.errors import BadOption

_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
_PASSWORD_PARAMETER = re.compile(r"(?i)(password=).*?(?=&\w+=|$)", re.DOTALL)
_HOSTS = re.compile(r"((\[[^\]]*\]|[^:\[\],]*)(:\d*)?(,|$))*")
_BARE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_UNESCAPED = re.compile(rf"[/?#@]|{_BARE_PERCENT.pattern}")
_ESCAPING_ADVICE = (
    "a user, a password or a value in the URL has / ? # @ or %; write %2F %3F %23 %40 %25 instead"
)


def split_url(url: str) -> SplitResult:
    """Split a URL into its parts; BadOption if it is not a URL."""
    try:
        return urlsplit(url)
    except ValueError:  # its text may contain the password
        raise BadOption(
            f"{mask_password(url)!r} is not a URL; expected sqlite:///file.db or "
            "postgresql://user@host/database"
        ) from None


def mask_password(url: str) -> str:
    """Return the URL without its password; hide too much rather than too little.

    The text between the first colon and the last @ counts as the password, because it may contain
    characters that should have been escaped.
    """
    scheme, rest = _split_scheme(_PASSWORD_PARAMETER.sub(r"\1***", url))
    if scheme == "sqlite://" and rest.startswith("/"):
        return url  # a path
    before, at, after = rest.rpartition("@")
    if at:
        user, colon, _ = before.partition(":")
        return f"{scheme}{user}:***@{after}" if colon else scheme + rest
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if scheme and not _HOSTS.fullmatch(hosts):  # "user:password" without a host
        return f"{scheme}{hosts.partition(':')[0]}:***{rest[len(hosts) :]}"
    return scheme + rest


def scrub_password(text: str, url: str) -> str:
    """Remove the password of `url` from a driver's error text.

    If the password has unescaped characters, the driver may quote only a part of it.  Then an
    advice replaces the whole text.
    """
    password = _user_password(url)
    parameters = [match[0].partition("=")[2] for match in _PASSWORD_PARAMETER.finditer(url)]
    if _UNESCAPED.search(password) or any(map(_BARE_PERCENT.search, parameters)):
        return _ESCAPING_ADVICE
    for secret in filter(None, (password, *parameters)):
        for form in (secret, unquote(secret)):
            text = text.replace(form, "***")
    return text


def _user_password(url: str) -> str:
    """Return the password before the host, or a text that may be one."""
    bare = _PASSWORD_PARAMETER.sub(r"\1***", url)
    if mask_password(url) == bare:
        return ""
    rest = _split_scheme(bare)[1]
    before, at, _ = rest.rpartition("@")
    return (before if at else rest).partition(":")[2]


def _split_scheme(url: str) -> tuple[str, str]:
    scheme = _SCHEME.match(url)
    return ("", url) if scheme is None else (scheme[0], url[scheme.end() :])

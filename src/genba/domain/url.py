"""URLs of databases: read, and shown without their passwords, however badly they are written."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, unquote, urlsplit

from genba.errors import BadOption

_HEAD = re.compile(r"[A-Za-z][\w+.-]*://")
_ASKED = re.compile(r"(?i)(password=).*?(?=&\w+=|$)", re.DOTALL)
_HOSTS = re.compile(r"((\[[^\]]*\]|[^:\[\],]*)(:\d*)?(,|$))*")
_BARE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_LOOSE = re.compile(rf"[/?#@]|{_BARE.pattern}")
_ADVICE = "a user, a password or a value in the URL has / ? # @ or % that is not written %2F %3F %23 %40 %25"


def split_url(url: str) -> SplitResult:
    """Its parts; BadOption where there are none."""
    try:
        return urlsplit(url)
    except ValueError:  # what it says may have the password in it
        raise BadOption(f"{mask_password(url)!r} is no URL") from None


def mask_password(url: str) -> str:
    """The URL without its password: rather too much is hidden than too little.

    What stands between the first colon and the last @ is taken for the password: it may have all signs that should
    have been escaped.
    """
    head, rest = _headed(_ASKED.sub(r"\1***", url))
    if head == "sqlite://" and rest.startswith("/"):
        return url  # a path
    before, at, after = rest.rpartition("@")
    if at:
        user, colon, _ = before.partition(":")
        return f"{head}{user}:***@{after}" if colon else head + rest
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if head and not _HOSTS.fullmatch(hosts):  # "user:password", and the host was forgotten
        return f"{head}{hosts.partition(':')[0]}:***{rest[len(hosts) :]}"
    return head + rest


def scrub_password(text: str, url: str) -> str:
    """A driver's words without the password of `url`; where that is cut in pieces, other words altogether."""
    own, asked = _own(url), [one[0].partition("=")[2] for one in _ASKED.finditer(url)]
    if _LOOSE.search(own) or any(_BARE.search(secret) for secret in asked):
        return _ADVICE
    for secret in filter(None, (own, *asked)):
        for form in (secret, unquote(secret)):
            text = text.replace(form, "***")
    return text


def _own(url: str) -> str:
    """The password before the host, or what may be one."""
    bare = _ASKED.sub(r"\1***", url)
    if mask_password(url) == bare:
        return ""
    rest = _headed(bare)[1]
    before, at, _ = rest.rpartition("@")
    return (before if at else rest).partition(":")[2]


def _headed(url: str) -> tuple[str, str]:
    head = _HEAD.match(url)
    return ("", url) if head is None else (head[0], url[head.end() :])

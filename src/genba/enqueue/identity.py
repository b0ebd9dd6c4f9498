"""Identities: 16 bytes that are equal for calls that count as the same job (`once`, `key`)."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from genba.enqueue.round_trip import decode_plain

_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def call_identity(task: str, payload: bytes | None) -> bytes:
    """Return the identity of a call in any order of keys; without a payload, of the task."""
    digest = blake2b(
        task.encode(), digest_size=16, person=b"genba task" if payload is None else b"genba call"
    )
    if payload is not None:
        digest.update(b"\0" + _encode_sorted(decode_plain(payload)))
    return digest.digest()


def key_identity(key: str) -> bytes:
    """Return the identity of a key that the caller chose; it never equals that of a call."""
    return blake2b(key.encode(), digest_size=16, person=b"genba key").digest()

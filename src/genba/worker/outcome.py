"""How a call ended, in the words of the wire."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from genba import wire
from genba.client.current_job import RunningJob
from genba.client.task import Task
from genba.domain.duration import duration
from genba.domain.outcome import OutcomeRequest
from genba.domain.states import PANIC
from genba.errors import BadOption, FailJob, RetryJob, Stopped
from genba.options.snapshot import OptionsSnapshot

ERROR_LIMIT = 64 * 1024  # characters
MESSAGE_LIMIT = 8 * 1024  # characters
_LONGEST_CHAIN = 20  # of causes
_FRAMES = 50  # of a traceback

# (outcome, result or error, further fields)
CallOutcome = tuple[int, bytes | None, dict[str, Any] | None]


class UnfitArguments(Exception):
    """The arguments of the job do not fit its task."""


def returned(task: Task[..., Any], value: Any) -> CallOutcome:
    payload, lost = task.arguments.encode_result(value)
    reason = {"reason": clean(f"the result could not be kept: {lost}")} if lost else None
    return wire.RETURNED, payload, reason


def raised(
    job: wire.JobMessage,
    error: BaseException,
    should_stop: Callable[[], bool],
    moment: Callable[[Any], int],
) -> CallOutcome:
    """Turn an exception into an outcome.

    `should_stop` says whether the job was asked to stop; `moment` parses a moment of RetryJob.
    """
    match error:
        case Stopped() | asyncio.CancelledError():
            # Without a request it is an exception like any other: uncounted, it could run for ever.
            return wire.STOPPED if should_stop() else wire.RAISED, describe(error), None
        case UnfitArguments():
            return wire.BAD_ARGUMENTS, None, {"reason": str(error)}
        case FailJob():
            return (
                wire.RAISED,
                describe(error),
                {"wants": "fail", "reason": text(error) or "FailJob"},
            )
        case RetryJob():
            return _retry(error, moment)
        case _:
            return (
                wire.RAISED,
                describe(error),
                None if _worth_a_retry(job, error) else {"final": True},
            )


def _retry(error: RetryJob, moment: Callable[[Any], int]) -> CallOutcome:
    request: dict[str, Any] = {"wants": "retry", "reason": text(error) or "RetryJob"}
    try:
        if error.delay is not None:
            request["delay"] = duration(error.delay)
        if error.at is not None:
            request["at"] = moment(error.at)
    except BadOption as wrong:
        return wire.RAISED, describe(wrong), None
    return wire.RAISED, describe(error), request


def _worth_a_retry(job: wire.JobMessage, error: BaseException) -> bool:
    """Return whether the job's retry rule allows another try after this error."""
    options = job.extra[0] if job.extra else None
    if not options or not ('"on":' in options or '"never":' in options):
        return True
    return OptionsSnapshot.read(options.encode()).retry_rule().covers(type(error))


def apply_requests(
    job: RunningJob,
    left_open: bool,
    outcome: int,
    payload: bytes | None,
    extra: dict[str, Any] | None,
) -> CallOutcome:
    """Add what the job has reported and requested; `left_open`: its transaction was open."""
    if job.progress_json is not None:
        extra = {**(extra or {}), "progress": job.progress_json}
    if job.clones and outcome == wire.RETURNED:
        extra = {**(extra or {}), "clones": job.clones}
    if outcome not in (wire.RETURNED, wire.RAISED):
        return outcome, payload, extra
    if left_open:
        reason = f"{PANIC}: a transaction was left open, and was rolled back"
        error = payload if outcome == wire.RAISED else None
        return outcome, error, {**(extra or {}), "wants": "hold", "reason": reason}
    request = job.request
    if request is None or outcome == wire.RAISED:
        # A raise is stronger than a request; RetryJob and FailJob have added theirs.
        return outcome, payload, extra
    if request.wants == "succeed" and request.result is None:
        return outcome, payload, {**(extra or {}), "wants": "succeed"}
    return outcome, request.result, {**(extra or {}), "reason": None, **_request_fields(request)}


def _request_fields(request: OutcomeRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"wants": request.wants, "free": request.free}
    if request.reason is not None:
        fields["reason"] = request.reason
    if request.delay is not None:
        fields["delay"] = request.delay
    if request.at is not None:
        fields["at"] = request.at
    return fields


def clean(text: str) -> str:
    """Replace what a database or a frame refuses: a broken text must not keep a job from ending."""
    return text.encode(errors="replace").decode().replace("\0", "\\0")


def text(error: BaseException) -> str:
    try:
        return clean(str(error)[:MESSAGE_LIMIT])
    except BaseException as broken:  # noqa: BLE001 - an exception without a text is reported too
        return f"(str() of it raised {type(broken).__name__})"


def describe(error: BaseException) -> bytes:
    """Encode an exception as JSON: type, message, traceback, causes; bounded, and never raises."""
    chain: list[dict[str, str]] = []
    seen: set[int] = set()
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and id(cause) not in seen and len(chain) < _LONGEST_CHAIN:
        seen.add(id(cause))
        chain.append({"type": clean(type(cause).__name__), "message": text(cause)})
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    try:
        lines = "".join(traceback.format_exception(error, limit=-_FRAMES))
    except BaseException:  # noqa: BLE001 - formatting runs the user's own code
        lines = "".join(traceback.format_tb(error.__traceback__, limit=-_FRAMES))
    if len(lines) > ERROR_LIMIT // 2:
        lines = "… (cut)\n" + lines[-ERROR_LIMIT // 2 :]
    described = {
        "type": clean(type(error).__name__),
        "message": text(error),
        "traceback": clean(lines),
        "causes": chain,
    }
    return msgspec.json.encode(described)

"""How a call ended, in the words that a node understands."""

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

ERROR_LIMIT = 64 * 1024
MESSAGE_LIMIT = 8 * 1024

CallOutcome = tuple[
    int, bytes | None, dict[str, Any] | None
]  # outcome, result or error, and whatever else there is to say


class UnfitArguments(Exception):
    """The job's arguments are not those of its task."""


def returned(task: Task[..., Any], value: Any) -> CallOutcome:
    payload, lost = task.arguments.encode_result(value)
    reason = {"reason": clean(f"the result could not be kept: {lost}")} if lost else None
    return wire.RETURNED, payload, reason


def raised(
    job: wire.JobMessage,
    error: BaseException,
    asked: Callable[[], bool],
    moment: Callable[[Any], int],
) -> CallOutcome:
    """`asked`: whether the job should stop; `moment`: what a text means."""
    match error:
        case Stopped() | asyncio.CancelledError():
            # One that nobody asked for is an exception like any other, and counted, or it would run for ever.
            return wire.STOPPED if asked() else wire.RAISED, describe(error), None
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
    wanted: dict[str, Any] = {"wants": "retry", "reason": text(error) or "RetryJob"}
    try:
        if error.delay is not None:
            wanted["delay"] = duration(error.delay)
        if error.at is not None:
            wanted["at"] = moment(error.at)
    except BadOption as wrong:
        return wire.RAISED, describe(wrong), None
    return wire.RAISED, describe(error), wanted


def _worth_a_retry(job: wire.JobMessage, error: BaseException) -> bool:
    """Whether the job's rule says nothing against another try after this one."""
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
    """With what the job has told and asked for; `left_open`: its transaction was not over."""
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
    wish = job.request
    if wish is None or outcome == wire.RAISED:
        return (
            outcome,
            payload,
            extra,
        )  # a raise is stronger than a request; RetryJob and FailJob have said theirs
    if wish.wants == "succeed" and wish.result is None:
        return outcome, payload, {**(extra or {}), "wants": "succeed"}
    return outcome, wish.result, {**(extra or {}), "reason": None, **_wanted(wish)}


def _wanted(wish: OutcomeRequest) -> dict[str, Any]:
    wanted: dict[str, Any] = {"wants": wish.wants, "free": wish.free}
    if wish.reason is not None:
        wanted["reason"] = wish.reason
    if wish.delay is not None:
        wanted["delay"] = wish.delay
    if wish.at is not None:
        wanted["at"] = wish.at
    return wanted


def clean(text: str) -> str:
    """Without what a database or a frame refuses: a broken text must not keep a job from ending."""
    return text.encode(errors="replace").decode().replace("\0", "\\0")


def text(error: BaseException) -> str:
    try:
        return clean(str(error)[:MESSAGE_LIMIT])
    except BaseException as broken:  # noqa: BLE001  an exception that cannot tell its text must still be told of
        return f"(its text could not be had: {type(broken).__name__})"


def describe(error: BaseException) -> bytes:
    """An exception as JSON: type, message, traceback, and the chain of its causes; bounded, and never raising."""
    chain: list[dict[str, str]] = []
    seen: set[int] = set()
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and id(cause) not in seen and len(chain) < 20:
        seen.add(id(cause))
        chain.append({"type": clean(type(cause).__name__), "message": text(cause)})
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    try:
        lines = "".join(traceback.format_exception(error, limit=-50))
    except BaseException:  # noqa: BLE001  formatting runs the user's own code
        lines = "".join(traceback.format_tb(error.__traceback__, limit=-50))
    if len(lines) > ERROR_LIMIT // 2:
        lines = "… (cut)\n" + lines[-ERROR_LIMIT // 2 :]
    told = {
        "type": clean(type(error).__name__),
        "message": text(error),
        "traceback": clean(lines),
        "causes": chain,
    }
    return msgspec.json.encode(told)

"""The simulator is worth something only if it finds what is wrong: each protocol, broken on purpose, is caught."""

from __future__ import annotations

from typing import Any

import pytest

from genba.errors import StoreError
from genba.node.database.lost_claims import LostClaims
from genba.node.decide.state import NodeState
from genba.node.decide.worker_state import ClaimedJob
from genba.storage.clients import sessions
from genba.storage.jobs.dependencies import Dependencies
from genba.storage.jobs.enqueue import Enqueuer
from genba.storage.limits.slots import LimitSlots
from genba.storage.nodes import take_over
from genba.storage.nodes.dead_nodes import DatabaseContact
from tests.sim.story import Story
from tests.sim.test_seeds import play, silence
from tests.sim.world import Stage

__all__ = ["silence"]  # a fixture

SEEDS = 300  # most are caught among the first ten

NO_FENCE = {
    "succeed": [("AND attempt = batch.attempt AND claim_id = batch.claim", "")],
    "end_attempts": [("AND attempt = :attempt AND claim_id = :claim", "")],
}
QUERIES: dict[str, dict[str, list[tuple[str, str]]]] = {
    "ends are written without a fence": NO_FENCE,
    "ends can be written twice": {
        "succeed": [("claim_id = NULL,", "")],
        "end_attempts": [("claim_id = NULL,", "")],
    },
    "an end does not free the node's hold": {"end_attempts": [("node = NULL,", "")]},
    "locks of the dead are not freed": {
        "free_locks_of_attempts": [("WHERE", "WHERE 0 AND")],
        "free_ownerless_locks": [("WHERE", "WHERE 0 AND")],
    },
    "a tick can be run twice": {
        "add_tick": [
            ("CONFLICT DO NOTHING", "CONFLICT (schedule_id, moment) DO UPDATE SET count = NULL")
        ],
        "write_schedule": [("next_at = :next_at", "next_at = COALESCE(next_at, :next_at)")],
    },
    "locks of the living are freed": {
        "ownerless_lock_names": [
            ("NOT EXISTS (SELECT 1 FROM genba.job", "EXISTS (SELECT 1 FROM genba.job")
        ],
        "free_ownerless_locks": [
            ("NOT EXISTS (SELECT 1 FROM genba.job", "EXISTS (SELECT 1 FROM genba.job")
        ],
    },
}


def caught(stage: Stage, hint: int = 0) -> str:
    for seed in (hint, *range(SEEDS)):
        try:
            play(stage, seed)
        except (AssertionError, StoreError) as error:
            return str(error)
    raise RuntimeError(f"{SEEDS} seeds have not found it")


@pytest.mark.parametrize("what", QUERIES)
def test_a_broken_statement_is_caught(what):
    assert caught(Stage(QUERIES[what]))


def _hasty(nodes: Any, suspects: Any, me: int, *rest: Any) -> Any:
    return [node for node in nodes if node.id != me and node.seen_at - node.beat_at > 1_000_000]


def _impatient(session: Any, silent: int, gone: bool, suspect: bool, lasted: int) -> bool:
    return silent > 1_000_000


def _anew(intake: Any, jobs: Any, ids: Any, epoch: Any) -> Any:
    return intake._commit(jobs, [], epoch)[0]


# With a seed that has found it once: hours of luck are not what a test should need.
BROKEN: dict[str, tuple[int, Any, str, Any]] = {
    "nodes are buried without waiting": (2, take_over, "find_dead_nodes", _hasty),
    "nodes are buried right after an outage": (
        128,
        DatabaseContact,
        "duration",
        lambda patience, now: 1 << 60,
    ),
    "jobs of a claim without an answer are not looked for": (
        16,
        LostClaims,
        "note",
        lambda doubts, claim: None,
    ),
    "an enqueue without an answer is repeated as another": (0, Enqueuer, "_commit_again", _anew),
    "a job that must run at most once is not marked first": (
        461,
        ClaimedJob,
        "must_mark",
        property(lambda held: False),
    ),
    "the children of an ended job are not looked at": (
        8,
        Dependencies,
        "jobs_ended",
        lambda *of: False,
    ),
    "sessions are ended without waiting": (6, sessions, "is_session_dead", _impatient),
    "slots are not freed": (1, LimitSlots, "free_slots", lambda *of: None),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_protocol_is_caught(what, monkeypatch):
    hint, where, name, instead = BROKEN[what]
    monkeypatch.setattr(where, name, instead)

    assert caught(Stage(), hint)


def cut_off() -> None:
    story = Story(Stage().world(1))
    story.play_cut_off()
    story.check()


def test_a_limited_job_that_goes_on_when_its_node_is_cut_off_is_caught(monkeypatch):
    cut_off()
    monkeypatch.setattr(NodeState, "too_late", lambda *of: False)

    with pytest.raises(AssertionError, match="ran at a time, and one may"):
        cut_off()

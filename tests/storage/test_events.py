"""The stream of events: complete, in order for each job, resumable anywhere, and bounded."""

from __future__ import annotations

import pytest
from tests.storage.builders import (
    CLAIM,
    a_job,
    claimed,
    connection,
    ending,
    enqueued,
    joined,
    one,
    running,
    success,
)

from genba.domain.events import KINDS, kinds_of, unfold
from genba.errors import BadOption, CursorExpired
from genba.storage.events import PAGE_ROWS, EventPosition


def passes(store, at=None, job=None):
    """All that is there, as (kind, job), and where that leaves the reader."""
    at = at or EventPosition()
    found = []
    while True:
        page = store.events.page(at, job)
        for row in page.rows:
            for index, single in enumerate(unfold(row.kind, row.at, row.job_id, row.data)):
                if single.job_id is not None and (row.seq != at.seq or index > at.index):
                    found.append(
                        (single.kind, single.job_id, page.during.after_row(row.seq, index))
                    )
        at = page.after
        if not page.more:
            return found, at


def kinds(store, job):
    return [kind for kind, id, _ in passes(store)[0] if id == job]


def test_each_job_of_a_batch_has_events_of_its_own(store):
    joined(store)
    ids = enqueued(store, 3)
    store.finish(1, [success(job) for job in claimed(store, 4)])

    for id in ids:
        assert kinds(store, id) == ["waiting", "running", "succeeded"]


def test_a_start_that_has_an_event_gets_no_second_one_with_the_end(store):
    joined(store)
    job = running(store)
    store.mark_started([(job.id, 1, CLAIM, 5)])
    store.finish(1, [success(job)])

    assert kinds(store, job.id) == ["waiting", "running", "succeeded"]


def test_every_state_that_a_job_comes_into_is_an_event(store, clock):
    job = one(store, delay=10_000_000)
    clock.advance(10)
    store.promote()
    joined(store)
    (job_in_hand,) = claimed(store, 1)
    store.record_progress([(job, 1, CLAIM, '[1.0,4.0,"half"]')])
    store.end(
        1, [ending(job_in_hand, state="held", cause="exception", reason="ask Ann", started=5)]
    )
    store.resume(job)
    store.cancel(job, "no more")
    store.requeue(job)

    assert kinds(store, job) == [
        "scheduled",
        "waiting",
        "progress",
        "running",
        "held",
        "resumed",
        "cancelled",
        "requeued",
    ]


def test_an_operators_change_records_actor_and_reason(store):
    job = one(store)
    store.changed_by = lambda: "ann@desk"
    store.hold(job, "stock-taking")

    (row,) = [row for row in store.events.page(EventPosition(), job).rows if row.kind == "held"]
    (single,) = unfold(row.kind, row.at, row.job_id, row.data)
    assert single.data == {"by": "ann@desk", "reason": "stock-taking"}


def test_a_reader_goes_on_behind_any_event_in_the_middle_of_a_batch_too(store):
    enqueued(store, 5)
    enqueued(store, 1)
    everything, _ = passes(store)

    for i, (_, _, place) in enumerate(everything):
        again = EventPosition.of(place.cursor)
        assert [event[:2] for event in passes(store, again)[0]] == [
            event[:2] for event in everything[i + 1 :]
        ]


def test_a_reader_that_has_seen_all_gets_what_is_new_and_only_that(store):
    enqueued(store, 2)
    _, at = passes(store)
    assert passes(store, at)[0] == []
    later = one(store)

    assert [event[:2] for event in passes(store, at)[0]] == [("waiting", later)]
    assert [event[:2] for event in passes(store, store.events.end())[0]] == []


def test_many_pages_are_read_without_gap(store):
    ids = [one(store) for _ in range(PAGE_ROWS + 20)]

    assert [id for _, id, _ in passes(store)[0]] == ids


def test_events_of_one_job_are_found_in_batches_of_others(store):
    ids = enqueued(store, 30)

    assert ("waiting", ids[7]) in [event[:2] for event in passes(store, job=ids[7])[0]]


def test_what_commits_late_is_not_skipped(store, url, engine):
    if engine == "sqlite":
        pytest.skip(
            "one writer at a time: no commit comes between the number of another and its commit"
        )
    early = one(store)
    with connection(url) as slow:
        slow.autocommit = False
        late = store.enqueue([a_job()], conn=slow)[0].id
        during = [one(store) for _ in range(3)]
        first, at = passes(store)
        assert [id for _, id, _ in first] == [early, *during]
        more = one(store)
        second, at = passes(store, EventPosition.of(first[-1][2].cursor))
        assert [id for _, id, _ in second] == [more]
        slow.commit()

    third, at = passes(store, at)
    assert [id for _, id, _ in third] == [late]
    assert passes(store, at)[0] == []
    assert passes(store, EventPosition.of(second[-1][2].cursor))[0] == third


def test_a_cursor_whose_events_are_gone_says_so(store, clock):
    enqueued(store, 1)
    ((_, _, place),) = passes(store)[0]
    for _ in range(5):
        one(store)
    clock.advance(100)
    one(store)

    assert store.events.prune(store.now() - 50_000_000, 5_000_000) == 6
    with pytest.raises(CursorExpired, match="keep_events"):
        passes(store, EventPosition.of(place.cursor))
    assert len(passes(store)[0]) == 1


def test_the_number_of_events_is_bounded(store):
    for _ in range(30):
        one(store)

    assert store.events.prune(0, 10) == 20
    assert len(passes(store)[0]) == 10


def test_a_reader_at_the_end_does_not_care_what_is_pruned_behind_it(store):
    for _ in range(30):
        one(store)
    _, at = passes(store)
    store.events.prune(0, 1)

    assert passes(store, at)[0] == []


def test_a_task_that_keeps_final_states_only_has_no_other_events(store):
    joined(store)
    quiet = '{"history":"final"}'
    ids = [one(store, options=quiet), *enqueued(store, 2, options=quiet)]
    jobs = claimed(store, 4)
    store.mark_started([(jobs[0].id, 1, CLAIM, 5)])
    store.finish(1, [success(jobs[0], quiet=True)])
    store.end(
        1, [ending(jobs[1], state="scheduled", cause="exception", due_at=1, quiet=True, started=5)]
    )
    store.end(1, [ending(jobs[2], state="failed", cause="exception", quiet=True, started=5)])

    assert [kinds(store, id) for id in ids] == [["succeeded"], [], ["failed"]]
    assert [len(store.attempts_of(id)) for id in ids] == [
        0,
        0,
        1,
    ]  # of what went well nothing is left to know


def test_a_batch_of_both_kinds_leaves_a_trace_of_those_that_want_one(store):
    joined(store)
    quiet = enqueued(store, 3, options='{"history":"final"}')
    loud = enqueued(store, 3)
    lost, *jobs = claimed(store, 8)
    store.end(1, [ending(lost, quiet=True)])

    ours = store.finish(1, [success(job, quiet=job.id in quiet) for job in (lost, *jobs)])

    assert ours == {*quiet, *loud} - {lost.id}
    assert [len(store.attempts_of(id)) for id in quiet] == [1, 0, 0]  # the first has failed
    assert [len(store.attempts_of(id)) for id in loud] == [1, 1, 1]


def test_the_attempts_of_a_job_that_is_tried_for_ever_are_bounded(store, clock):
    joined(store)
    job = one(store)
    for _ in range(130):
        (job_in_hand,) = claimed(store, 1)
        store.end(1, [ending(job_in_hand, state="waiting", cause="exception")])

    attempts = [row.attempt for row in store.attempts_of(job)]
    assert attempts[-1] == 130
    assert 100 <= len(attempts) <= 120


def test_what_is_no_cursor_is_refused():
    with pytest.raises(BadOption, match="is not a cursor of an event"):
        EventPosition.of("yesterday")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("waiting", "waiting"),
        ("postponed", "scheduled"),
        ("processing", "running"),
        ("done", "succeeded"),
        ("failed", "failed"),
        ("timeout", "timed_out"),
        ("cancel", "cancelled"),
        ("workerSpawn", "worker_started"),
        ("workerKill", "worker_ended"),
    ],
)
def test_the_ancestors_names_of_events_are_understood(name, kind):
    full = f"taskscheduler.on{name[0].upper()}{name[1:]}"

    assert kinds_of(name) == kinds_of(full) == frozenset({kind})
    assert kind in KINDS


def test_all_and_unknown_names():
    assert kinds_of("*") is None
    assert kinds_of(["done", "*"]) is None
    with pytest.raises(BadOption, match="did you mean"):
        kinds_of("succeded")

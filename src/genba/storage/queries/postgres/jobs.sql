-- name: next_ids
SELECT nextval('genba.job_id') FROM generate_series(1, :count);

-- name: claim
-- literal: limit
-- ctid = ANY(ARRAY(...)): joined to the sub-select instead, the planner hashes the whole table. The row is locked, so it is
-- still where it was found; by id it would be looked up once more. (One that was changed just before it was locked is not
-- seen there, and left for the next claim.)
-- LIMIT as a literal: as a parameter, a generic plan assumes a tenth of the table.
UPDATE genba.job AS j
   SET state = 'running', attempt = j.attempt + 1, claim_id = :claim, node = :node, claimed_at = /* now */, started_mark = NULL,
       key_hash = CASE WHEN j.once_waiting THEN NULL ELSE j.key_hash END
 WHERE j.ctid = ANY(ARRAY(
           SELECT ctid FROM genba.job
            WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
              AND task = ANY(:tasks)
              AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live' AND n.lease_until > /* boot */)
              AND EXISTS (SELECT 1 FROM genba.namespace s WHERE s.name = :namespace AND s.epoch = CAST(:epoch AS bigint))
            ORDER BY rank, id LIMIT :limit FOR UPDATE SKIP LOCKED))
RETURNING j.rank, j.id, j.attempt, j.task, j.args, j.options, j.priority, j.retries, j.crashes, j.losses, j.saved, j.due_at, j.open_deps, j.claimed_at, j.expires_at, j.queue, j.buckets;

-- name: succeed(id, attempt, claim, result, claimed, started, ended, pid, cpu, peak, quiet, limited)
-- The fence alone guards: a test of the state makes the planner walk the running rows instead of the primary key.
UPDATE genba.job AS j
   SET state = 'succeeded', result = e.result, finished_at = /* now */, claim_id = NULL, node = NULL, reason = NULL, error = NULL,
       key_hash = CASE WHEN j.unique_until > /* now */ THEN j.key_hash END,
       ran_on = :node, ran_from = e.started, ran_until = e.ended, ran_pid = e.pid, ran_cpu = e.cpu, ran_peak = e.peak
  FROM unnest(:id, :attempt, :claim, CAST(:result AS bytea[]), CAST(:started AS bigint[]), CAST(:ended AS bigint[]),
              CAST(:pid AS bigint[]), CAST(:cpu AS bigint[]), CAST(:peak AS bigint[]))
           AS e (id, attempt, claim, result, started, ended, pid, cpu, peak)
 WHERE j.id = e.id AND j.attempt = e.attempt AND j.claim_id = e.claim AND j.cancel_requested IS NULL AND j.schedule_id IS NULL
RETURNING e.id, e.attempt;

-- name: end(id, attempt, claim, state, attempt_after, due_at, due_from, rank, retries, crashes, losses, reason, error, result, progress)
-- Asked to stop, it does not come back: the request may have crossed this end on its way.
WITH e AS (
    SELECT * FROM unnest(:id, :attempt, :claim, :state, :attempt_after, CAST(:due_at AS bigint[]), CAST(:due_from AS bigint[]), CAST(:rank AS bigint[]), :retries, :crashes, :losses,
                         CAST(:reason AS text[]), CAST(:error AS text[]), CAST(:result AS bytea[]), CAST(:progress AS text[]))
        AS e (id, attempt, claim, state, attempt_after, due_at, due_from, rank, retries, crashes, losses, reason, error, result, progress)
)
UPDATE genba.job AS j
   SET state = CASE WHEN j.cancel_requested IS NOT NULL AND e.state IN ('scheduled', 'waiting', 'held') THEN 'cancelled' ELSE e.state END,
       attempt = e.attempt_after, due_at = COALESCE(e.due_at, j.due_at), due_from = COALESCE(e.due_from, j.due_from), rank = COALESCE(e.rank, j.rank),
       retries = e.retries, crashes = e.crashes, losses = e.losses,
       reason = CASE WHEN j.cancel_requested IS NULL OR e.state IN ('succeeded', 'failed', 'timed_out') THEN e.reason
                     ELSE COALESCE(CASE WHEN e.state = 'cancelled' THEN e.reason END, j.reason, CASE j.cancel_requested WHEN 'kill' THEN 'killed' ELSE 'cancelled' END) END,
       error = CASE WHEN e.state <> 'succeeded' THEN COALESCE(e.error, j.error) END, result = e.result,
       progress = COALESCE(e.progress, j.progress), claim_id = NULL, node = NULL, started_mark = NULL,
       finished_at = CASE WHEN e.state IN ('succeeded', 'failed', 'timed_out', 'cancelled') OR j.cancel_requested IS NOT NULL THEN /* now */ END,
       cancel_requested = NULL,
       key_hash = CASE WHEN (e.state IN ('succeeded', 'failed', 'timed_out', 'cancelled') OR j.cancel_requested IS NOT NULL)
                       AND (j.unique_until IS NULL OR j.unique_until <= /* now */) THEN NULL ELSE j.key_hash END
  FROM e
 WHERE j.id = e.id AND j.attempt = e.attempt AND j.claim_id = e.claim
RETURNING j.id, e.attempt, j.claimed_at, j.state, j.schedule_id, j.buckets, j.granted_at, e.claim;

-- name: history(job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak, error, log)
INSERT INTO genba.attempt (job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak, error, log)
SELECT * FROM unnest(:job_id, CAST(:attempt AS integer[]), CAST(:claimed_at AS bigint[]), CAST(:started_at AS bigint[]), :ended_at, :cause, CAST(:node AS bigint[]),
                     CAST(:pid AS integer[]), CAST(:cpu AS bigint[]), CAST(:peak AS bigint[]), CAST(:error AS text[]), CAST(:log AS text[]))
    ON CONFLICT DO NOTHING;

-- name: mark(id, attempt, claim, started)
-- The same again, if the answer to it was lost.
UPDATE genba.job AS j SET started_mark = e.started
  FROM unnest(:id, :attempt, :claim, :started) AS e (id, attempt, claim, started)
 WHERE j.id = e.id AND j.attempt = e.attempt AND j.claim_id = e.claim AND (j.started_mark IS NULL OR j.started_mark = e.started)
RETURNING j.id, j.options;

-- name: note_progress(id, attempt, claim, progress)
-- Not of a job that has locked its own row: the node must not wait for it.
UPDATE genba.job AS j SET progress = e.progress
  FROM unnest(:id, :attempt, :claim, :progress) AS e (id, attempt, claim, progress)
 WHERE j.id = e.id AND j.attempt = e.attempt AND j.claim_id = e.claim
   AND j.id = ANY(ARRAY(SELECT id FROM genba.job WHERE id = ANY(:id) FOR UPDATE SKIP LOCKED))
RETURNING j.id, j.options;

-- name: promote
UPDATE genba.job AS j SET state = 'waiting',
       rank = CASE WHEN j.fair_key IS NULL THEN j.due_at - {boost after crashes} ELSE 9223372036854775807 END
 WHERE j.id = ANY(ARRAY(SELECT id FROM genba.job WHERE namespace = :namespace AND state = 'scheduled' AND due_at <= /* now */
                         ORDER BY due_at LIMIT 500 FOR UPDATE SKIP LOCKED))
RETURNING j.id, j.state, j.options, j.buckets;

-- name: unknown_in_front
-- Of so many that the next claims will meet: to look at a backlog of millions takes seconds.
SELECT id FROM (SELECT id, task FROM genba.job WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
                 ORDER BY rank, id LIMIT :front) AS ahead
 WHERE NOT (task = ANY(:tasks));

-- name: park_unknown
UPDATE genba.job AS j SET parked_on = 'unknown task ' || j.task
 WHERE j.id = ANY(ARRAY(SELECT id FROM genba.job WHERE id = ANY(:ids) AND state = 'waiting' AND parked_on IS NULL
                           AND NOT (task = ANY(:tasks)) FOR UPDATE SKIP LOCKED));

-- name: states(id)
SELECT id, state FROM genba.job WHERE id = ANY(:id) AND namespace = :namespace;

-- name: feed
-- Hungry nodes that serve the queue, no more than there are jobs; whoever clears the flag wakes it.
WITH quick AS (SELECT set_config('synchronous_commit', 'off', true)),
     fed AS (
    UPDATE genba.node SET hungry = false
      FROM quick
     WHERE id IN (SELECT id FROM genba.node WHERE namespace = :namespace AND hungry AND state = 'live' AND position(:queue IN queues) > 0
                   LIMIT :jobs FOR UPDATE SKIP LOCKED)
    RETURNING id)
SELECT pg_notify('genba_' || id, '') FROM fed;

-- name: enqueue_one_event
-- Done by enqueue_one itself.

-- name: session_lock
SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND classid = CAST(:high AS bigint)::oid AND objid = CAST(:low AS bigint)::oid AND granted;

-- name: knock
SELECT pg_notify('genba_' || CAST(:node AS bigint), '');

-- name: enqueue_one
-- The job, its event and the call to a hungry node in one statement, so that a single enqueue is one round trip and one commit.
-- The clock is asked once: each time more would be a plan of its own to start (a tenth of what the server does here).
-- (A node that gets hungry meanwhile is not seen; it looks once more, soon.)
-- Nothing, if an operator has changed the rules since :epoch.  In a SELECT a parameter is text unless it is cast.
WITH clock AS MATERIALIZED (SELECT /* now */ AS now), made AS (
    INSERT INTO genba.job (id, created_at, due_at, due_from, rank, state, expires_at, unique_until, parent_id, priority,
                           open_deps, once_waiting, namespace, queue, task, key, key_hash, tags, options, args)
    SELECT CAST(:id AS bigint), t.now,
            CASE WHEN CAST(:due_at AS bigint) > t.now THEN CAST(:due_at AS bigint) ELSE t.now + CAST(:delay AS bigint) END,
            CASE WHEN CAST(:due_at AS bigint) > t.now THEN 0 END,
            CASE WHEN CAST(:due_at AS bigint) > t.now THEN CAST(:due_at AS bigint) ELSE t.now + CAST(:delay AS bigint) END - CAST(:boost AS bigint),
            CASE WHEN CAST(:open_deps AS bigint) > 0 THEN 'blocked'
                 WHEN CAST(:due_at AS bigint) > t.now OR CAST(:delay AS bigint) > 0 THEN 'scheduled'
                 ELSE 'waiting' END,
            COALESCE(CAST(:expires_at AS bigint), t.now + CAST(:expires_in AS bigint)), t.now + CAST(:unique_for AS bigint), CAST(:parent_id AS bigint), CAST(:priority AS integer),
            CAST(:open_deps AS integer), CAST(:once_waiting AS boolean), :namespace, :queue, :task, :key, :key_hash, :tags, :options, CAST(:args AS bytea)
          FROM genba.namespace s, clock AS t WHERE s.name = :namespace AND (CAST(:epoch AS bigint) IS NULL OR s.epoch = CAST(:epoch AS bigint))
        ON CONFLICT (namespace, key_hash) WHERE key_hash IS NOT NULL DO NOTHING
        RETURNING id, state
), told AS (
    INSERT INTO genba.event (at, namespace, kind, job_id, node)
    SELECT t.now, :namespace, state, id, CAST(:node AS bigint) FROM made, clock AS t WHERE NOT CAST(:quiet AS boolean)
), fed AS (
    UPDATE genba.node SET hungry = false
     WHERE id IN (SELECT id FROM genba.node WHERE CAST(:call AS boolean) AND namespace = :namespace AND hungry AND state = 'live'
                     AND position('"' || CAST(:queue AS text) || '"' IN queues) > 0 LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING id
)
SELECT id, state, (SELECT count(pg_notify('genba_' || fed.id, '')) FROM fed) FROM made;

-- name: enqueue_simple
-- The job and its event, and the call to a hungry node, as enqueue_one does; of a job of which nothing is said but what it does.
WITH made AS (
    INSERT INTO genba.job (id, created_at, due_at, rank, state, priority, namespace, queue, task, options, args)
    SELECT CAST(:id AS bigint), t.now, t.now, t.now - CAST(:boost AS bigint), 'waiting', CAST(:priority AS integer),
           s.name, :queue, :task, :options, CAST(:args AS bytea)
      FROM genba.namespace s, (SELECT /* now */ AS now) AS t
     WHERE s.name = :namespace AND (CAST(:epoch AS bigint) IS NULL OR s.epoch = CAST(:epoch AS bigint))
    RETURNING id, created_at
), told AS (
    INSERT INTO genba.event (at, namespace, kind, job_id, node)
    SELECT created_at, :namespace, 'waiting', id, CAST(:node AS bigint) FROM made
), fed AS (
    UPDATE genba.node SET hungry = false
     WHERE id IN (SELECT id FROM genba.node WHERE namespace = :namespace AND hungry AND state = 'live'
                     AND position('"' || CAST(:queue AS text) || '"' IN queues) > 0 LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING id
)
SELECT id, 0 * (SELECT count(pg_notify('genba_' || fed.id, '')) FROM fed) FROM made;  -- 0: nobody is left to be called

-- name: enqueue_simple_again
-- Soon after another one: whether a node is hungry is only looked at. To be ready to call one takes as long as to write the event.
WITH made AS (
    INSERT INTO genba.job (id, created_at, due_at, rank, state, priority, namespace, queue, task, options, args)
    SELECT CAST(:id AS bigint), t.now, t.now, t.now - CAST(:boost AS bigint), 'waiting', CAST(:priority AS integer),
           s.name, :queue, :task, :options, CAST(:args AS bytea)
      FROM genba.namespace s, (SELECT /* now */ AS now) AS t
     WHERE s.name = :namespace AND (CAST(:epoch AS bigint) IS NULL OR s.epoch = CAST(:epoch AS bigint))
    RETURNING id, created_at
)
INSERT INTO genba.event (at, namespace, kind, job_id, node)
SELECT created_at, :namespace, 'waiting', id, CAST(:node AS bigint) FROM made
RETURNING 1, (SELECT count(*) FROM genba.node WHERE namespace = :namespace AND hungry AND state = 'live'
                      AND position('"' || CAST(:queue AS text) || '"' IN queues) > 0);

-- name: set_hungry
-- A hint need not survive a crash of the server.
WITH quick AS (SELECT set_config('synchronous_commit', 'off', true))
UPDATE genba.node SET hungry = :hungry FROM quick WHERE id = :id AND hungry <> :hungry RETURNING id;

-- name: add_tags(name, job_id)
INSERT INTO genba.tag (namespace, name, job_id) SELECT :namespace, * FROM unnest(:name, :job_id) ON CONFLICT DO NOTHING;

-- name: prune_these
DELETE FROM genba.job j
 WHERE j.id = ANY(:ids) AND j.state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
   AND NOT EXISTS (SELECT 1 FROM genba.dependency d JOIN genba.job c ON c.id = d.child_id
                    WHERE d.parent_id = j.id AND c.finished_at IS NULL)
RETURNING j.id;

-- name: prune_attempts(job_id)
DELETE FROM genba.attempt WHERE job_id = ANY(:job_id);

-- name: prune_tags(job_id)
DELETE FROM genba.tag WHERE job_id = ANY(:job_id);

-- name: put_apart(job_id, args)
-- PostgreSQL keeps what is long beside the row by itself, and does not write it anew.

-- name: prune_arguments(job_id)
-- As above.

-- name: prune_edges(job_id)
DELETE FROM genba.dependency WHERE child_id = ANY(:job_id);

-- name: any_work
SELECT 1 FROM genba.job WHERE namespace = :namespace AND queue = ANY(:queues) AND state = 'waiting' AND parked_on IS NULL AND task = ANY(:tasks) LIMIT 1;

-- name: parked_among(reason)
SELECT e.reason FROM unnest(:reason) AS e (reason) WHERE EXISTS (SELECT 1 FROM genba.job WHERE namespace = :namespace AND parked_on = e.reason);

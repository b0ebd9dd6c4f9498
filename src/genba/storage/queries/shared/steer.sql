-- name: cancel
-- For jobs that have not started; a running job gets a stop request.
UPDATE genba.job
   SET state = 'cancelled', reason = :reason, finished_at = /* now */, parked_on = NULL,
       version = version % 2000000000 + 1,
       key_hash = CASE WHEN unique_until > /* now */ THEN key_hash END
 WHERE id = :id AND namespace = :namespace AND state IN ('blocked', 'scheduled', 'waiting', 'held')
RETURNING id, schedule_id;

-- name: request_stop
UPDATE genba.job
   SET cancel_requested = CASE WHEN cancel_requested = 'kill' THEN 'kill' ELSE :how END,
       reason = COALESCE(CAST(:reason AS text), reason)
 WHERE id IN (SELECT id FROM genba.job WHERE id = :id AND namespace = :namespace
              AND state = 'running' /* lock */)
RETURNING node, attempt;

-- name: node_of_job
SELECT node, attempt FROM genba.job WHERE id = :id AND namespace = :namespace AND state = 'running';

-- name: hold
UPDATE genba.job SET state = 'held', reason = :reason, parked_on = NULL,
    version = version % 2000000000 + 1
 WHERE id = :id AND namespace = :namespace AND state IN ('blocked', 'scheduled', 'waiting')
RETURNING id;

-- name: resume
-- The new state follows from the row: the job may still depend on others, and its due time may lie
-- ahead, unless only because the clock was set back.
UPDATE genba.job
   SET state = CASE WHEN open_deps > 0 THEN 'blocked' WHEN due_at > /* now */
       AND due_at > COALESCE(due_from, created_at) THEN 'scheduled' ELSE 'waiting' END,
       rank = CASE WHEN fair_key IS NULL THEN due_at - {boost} ELSE 9223372036854775807 END,
       reason = NULL, crashes = 0, losses = 0, version = version % 2000000000 + 1
 WHERE id = :id AND namespace = :namespace AND state = 'held'
RETURNING state;

-- name: requeue
-- Counters start again, earlier attempts stay in the history; a checkpoint stays, unless the job
-- succeeded.
UPDATE genba.job
   SET state = CASE WHEN open_deps > 0 THEN 'blocked' ELSE 'waiting' END, due_at = /* now */,
       due_from = /* now */,
       rank = CASE WHEN fair_key IS NULL THEN /* now */ - {boost} ELSE 9223372036854775807 END,
       retries = 0, crashes = 0, losses = 0, reason = NULL, error = NULL, result = NULL,
       progress = NULL, finished_at = NULL,
       saved = CASE WHEN state <> 'succeeded' THEN saved END,
       cancel_requested = NULL, granted_at = NULL, expires_at = NULL, key_hash = NULL,
       started_mark = NULL, version = version % 2000000000 + 1
 WHERE id = :id AND namespace = :namespace
   AND state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
RETURNING state;

-- name: delete_job(id)
DELETE FROM genba.job WHERE id = :id AND namespace = :namespace AND state <> 'running' RETURNING id;

-- name: changeable_job
SELECT version, priority, due_at, due_from, expires_at, crashes, queue, options FROM genba.job
 WHERE id = :id AND namespace = :namespace AND state IN ('blocked', 'scheduled', 'waiting', 'held');

-- name: change_job
-- A job that is postponed leaves its place; one that is parked and still due stays parked.
-- The state changes only with a new due time: the old one may lie ahead because the clock was set
-- back.
UPDATE genba.job
   SET queue = :queue, priority = :priority, due_at = :due_at, due_from = :due_from,
       expires_at = :expires_at, rank = CASE WHEN fair_key IS NULL THEN CAST(:rank AS bigint)
           ELSE 9223372036854775807 END, options = :options,
       state = CASE WHEN state NOT IN ('scheduled', 'waiting')
           OR NOT CAST(:moved AS boolean) THEN state
               WHEN CAST(:due_at AS bigint) > /* now */ THEN 'scheduled' ELSE 'waiting' END,
       parked_on = CASE WHEN state = 'waiting'
           AND (NOT CAST(:moved AS boolean)
                OR CAST(:due_at AS bigint) <= /* now */) THEN parked_on END,
       version = version % 2000000000 + 1
 WHERE id = :id AND version = :version AND state IN ('blocked', 'scheduled', 'waiting', 'held')
RETURNING id;

-- name: next_ids
UPDATE genba.sequence SET value = value + :count WHERE name = 'job_id' RETURNING value;

-- name: claim
UPDATE genba.job
   SET state = 'running', attempt = attempt + 1, claim_id = :claim, node = :node, claimed_at = /* now */, started_mark = NULL,
       key_hash = CASE WHEN once_waiting THEN NULL ELSE key_hash END
 WHERE id IN (SELECT id FROM genba.job
               WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
                 AND task IN (SELECT value FROM json_each(:tasks))
                 AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live' AND n.lease_until > /* boot */)
               ORDER BY rank, id LIMIT :limit)
RETURNING rank, id, attempt, task, args, options, priority, retries, crashes, losses, saved, due_at, open_deps, claimed_at, expires_at, queue;

-- name: succeed(id, attempt, claim, result, claimed, started, ended, pid, cpu, peak)
UPDATE genba.job
   SET state = 'succeeded', result = :result, finished_at = /* now */, claim_id = NULL, node = NULL, reason = NULL, error = NULL,
       key_hash = CASE WHEN unique_until > /* now */ THEN key_hash END
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim AND cancel_requested IS NULL
RETURNING id, attempt;

-- name: succeed_history(id, attempt, claim, result, claimed, started, ended, pid, cpu, peak)
INSERT INTO genba.attempt (job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak)
VALUES (:id, :attempt, :claimed, :started, :ended, 'returned', :node, :pid, :cpu, :peak);

-- name: end(id, attempt, claim, state, attempt_after, due_at, rank, retries, crashes, losses, reason, error, result, progress)
-- Asked to stop, it does not come back: the request may have crossed this end on its way.
UPDATE genba.job
   SET state = CASE WHEN cancel_requested IS NOT NULL AND :state IN ('scheduled', 'waiting', 'held') THEN 'cancelled' ELSE :state END,
       attempt = :attempt_after, due_at = COALESCE(:due_at, due_at), rank = COALESCE(:rank, rank),
       retries = :retries, crashes = :crashes, losses = :losses,
       reason = CASE WHEN cancel_requested IS NULL OR :state IN ('succeeded', 'failed', 'timed_out') THEN :reason
                     ELSE COALESCE(CASE WHEN :state = 'cancelled' THEN :reason END, reason, 'cancelled') END,
       error = CASE WHEN :state <> 'succeeded' THEN COALESCE(:error, error) END, result = :result,
       progress = COALESCE(:progress, progress), claim_id = NULL, node = NULL, started_mark = NULL,
       finished_at = CASE WHEN :state IN ('succeeded', 'failed', 'timed_out', 'cancelled') OR cancel_requested IS NOT NULL THEN /* now */ END,
       cancel_requested = NULL,
       key_hash = CASE WHEN (:state IN ('succeeded', 'failed', 'timed_out', 'cancelled') OR cancel_requested IS NOT NULL)
                       AND (unique_until IS NULL OR unique_until <= /* now */) THEN NULL ELSE key_hash END
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim
RETURNING id, :attempt, claimed_at, state;

-- name: history(job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak, error, log)
INSERT INTO genba.attempt (job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak, error, log)
VALUES (:job_id, :attempt, :claimed_at, :started_at, :ended_at, :cause, :node, :pid, :cpu, :peak, :error, :log)
    ON CONFLICT DO NOTHING;

-- name: mark(id, attempt, claim, started)
UPDATE genba.job SET started_mark = :started
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim AND started_mark IS NULL
RETURNING id;

-- name: note_progress(id, attempt, claim, progress)
UPDATE genba.job SET progress = :progress WHERE id = :id AND attempt = :attempt AND claim_id = :claim RETURNING id;

-- name: promote
UPDATE genba.job SET state = 'waiting', rank = due_at - (priority - crashes) * :age_step
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND state = 'scheduled' AND due_at <= /* now */
               ORDER BY due_at LIMIT 500);

-- name: park_unknown
UPDATE genba.job SET parked_on = 'unknown task ' || task
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
                 AND task NOT IN (SELECT value FROM json_each(:tasks))
               ORDER BY rank, id LIMIT 500);

-- name: with_children
SELECT DISTINCT parent_id FROM genba.dependency WHERE state = 'open' AND parent_id IN (SELECT value FROM json_each(:ids));

-- name: unsettled
SELECT u.seq, u.parent_id, j.state FROM genba.unsettled u LEFT JOIN genba.job j ON j.id = u.parent_id
 WHERE u.namespace = :namespace ORDER BY u.seq LIMIT 200;

-- name: parent_state
SELECT state FROM genba.job WHERE id = :id;

-- name: states(id)
SELECT id, state FROM genba.job WHERE id = :id AND namespace = :namespace;

-- name: feed
-- Wake-ups on SQLite do not ask the database.
SELECT 1 WHERE 0;

-- name: any_work
SELECT 1 FROM genba.job WHERE namespace = :namespace AND queue IN (SELECT value FROM json_each(:queues)) AND state = 'waiting' AND parked_on IS NULL
   AND task IN (SELECT value FROM json_each(:tasks)) LIMIT 1;

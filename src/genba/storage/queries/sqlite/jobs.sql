-- name: next_ids
UPDATE genba.sequence SET value = value + :count WHERE name = 'job_id' RETURNING value;

-- name: enqueue_alike(id, args)
-- Jobs that differ in nothing else: two values for each of them go from Python to SQLite instead of twenty, and hundreds to a step.
INSERT INTO genba.job (id, created_at, due_at, due_from, rank, state, expires_at, unique_until, parent_id, priority, open_deps, once_waiting,
                       namespace, queue, task, key, key_hash, tags, options, args)
SELECT batch.id, :created_at, :due_at, :due_from, :rank, :state, :expires_at, :unique_until, :parent_id, :priority, :open_deps, :once_waiting,
       :namespace, :queue, :task, :key, :key_hash, :tags, :options, batch.args
  FROM /* rows */ AS batch;

-- name: claim
-- All rows in one value: each row that SQLite hands over on its own costs a change of Python's lock, and another thread may keep it.
-- Nobody else writes between this and claim_these, which take a turn together.
SELECT CAST(json_group_array(json_array(rank, id, attempt + 1, task, CAST(args AS TEXT), options, priority, retries, crashes, losses, CAST(saved AS TEXT),
                                        due_at, open_deps, /* now */, expires_at, queue, buckets)) AS BLOB)
  FROM (SELECT * FROM genba.job
         WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
           AND task IN (SELECT value FROM json_each(:tasks))
           AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live' AND n.lease_until > /* boot */)
           AND EXISTS (SELECT 1 FROM genba.namespace s WHERE s.name = :namespace AND s.epoch = :epoch)
         ORDER BY rank, id LIMIT :limit);

-- name: claim_one_by_one
-- The same for rows that are no text: somebody else than genba has written them.
SELECT rank, id, attempt + 1, task, CAST(args AS BLOB), options, priority, retries, crashes, losses, CAST(saved AS BLOB), due_at, open_deps, /* now */, expires_at, queue, buckets
  FROM genba.job
 WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
   AND task IN (SELECT value FROM json_each(:tasks))
   AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live' AND n.lease_until > /* boot */)
   AND EXISTS (SELECT 1 FROM genba.namespace s WHERE s.name = :namespace AND s.epoch = :epoch)
 ORDER BY rank, id LIMIT :limit;

-- name: apart
SELECT job_id, args FROM genba.argument WHERE job_id IN (SELECT value FROM json_each(:ids));

-- name: claim_these
UPDATE genba.job
   SET state = 'running', attempt = attempt + 1, claim_id = :claim, node = :node, claimed_at = /* now */, started_mark = NULL,
       key_hash = CASE WHEN once_waiting THEN NULL ELSE key_hash END
 WHERE id IN (SELECT value FROM json_each(:ids));

-- name: succeed(id, attempt, claim, result, claimed, started, ended, pid, cpu, peak, quiet, limited)
UPDATE genba.job
   SET state = 'succeeded', result = batch.result, finished_at = /* now */, claim_id = NULL, node = NULL, reason = NULL, error = NULL,
       key_hash = CASE WHEN unique_until > /* now */ THEN key_hash END,
       ran_on = :node, ran_from = batch.started, ran_until = batch.ended, ran_pid = batch.pid, ran_cpu = batch.cpu, ran_peak = batch.peak
  FROM /* rows */ AS batch
 WHERE genba.job.id = batch.id AND attempt = batch.attempt AND claim_id = batch.claim AND cancel_requested IS NULL AND schedule_id IS NULL
RETURNING id, attempt;

-- name: end(id, attempt, claim, state, attempt_after, due_at, due_from, rank, retries, crashes, losses, reason, error, result, progress)
-- Asked to stop, it does not come back: the request may have crossed this end on its way.
UPDATE genba.job
   SET state = CASE WHEN cancel_requested IS NOT NULL AND :state IN ('scheduled', 'waiting', 'held') THEN 'cancelled' ELSE :state END,
       attempt = :attempt_after, due_at = COALESCE(:due_at, due_at), due_from = COALESCE(:due_from, due_from), rank = COALESCE(:rank, rank),
       retries = :retries, crashes = :crashes, losses = :losses,
       reason = CASE WHEN cancel_requested IS NULL OR :state IN ('succeeded', 'failed', 'timed_out') THEN :reason
                     ELSE COALESCE(CASE WHEN :state = 'cancelled' THEN :reason END, reason, CASE cancel_requested WHEN 'kill' THEN 'killed' ELSE 'cancelled' END) END,
       error = CASE WHEN :state <> 'succeeded' THEN COALESCE(:error, error) END, result = :result,
       progress = COALESCE(:progress, progress), claim_id = NULL, node = NULL, started_mark = NULL,
       finished_at = CASE WHEN :state IN ('succeeded', 'failed', 'timed_out', 'cancelled') OR cancel_requested IS NOT NULL THEN /* now */ END,
       cancel_requested = NULL,
       key_hash = CASE WHEN (:state IN ('succeeded', 'failed', 'timed_out', 'cancelled') OR cancel_requested IS NOT NULL)
                       AND (unique_until IS NULL OR unique_until <= /* now */) THEN NULL ELSE key_hash END
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim
RETURNING id, :attempt, claimed_at, state, schedule_id, buckets, granted_at, :claim;

-- name: history(job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak, error, log)
INSERT INTO genba.attempt (job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak, error, log)
VALUES (:job_id, :attempt, :claimed_at, :started_at, :ended_at, :cause, :node, :pid, :cpu, :peak, :error, :log)
    ON CONFLICT DO NOTHING;

-- name: mark(id, attempt, claim, started)
-- The same again, if the answer to it was lost.
UPDATE genba.job SET started_mark = :started
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim AND (started_mark IS NULL OR started_mark = :started)
RETURNING id, options;

-- name: note_progress(id, attempt, claim, progress)
UPDATE genba.job SET progress = :progress WHERE id = :id AND attempt = :attempt AND claim_id = :claim RETURNING id, options;

-- name: promote
UPDATE genba.job SET state = 'waiting', 
       rank = CASE WHEN fair_key IS NULL THEN due_at - {boost after crashes} ELSE 9223372036854775807 END
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND state = 'scheduled' AND due_at <= /* now */
               ORDER BY due_at LIMIT 500)
RETURNING id, state, options, buckets;

-- name: unknown_in_front
-- Of so many that the next claims will meet: to look at a backlog of millions takes seconds.
SELECT id FROM (SELECT id, task FROM genba.job WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
                 ORDER BY rank, id LIMIT :front)
 WHERE task NOT IN (SELECT value FROM json_each(:tasks));

-- name: park_unknown
UPDATE genba.job SET parked_on = 'unknown task ' || task
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'waiting' AND parked_on IS NULL
   AND task NOT IN (SELECT value FROM json_each(:tasks));

-- name: states(id)
SELECT id, state FROM genba.job WHERE id = :id AND namespace = :namespace;

-- name: feed
-- Wake-ups on SQLite do not ask the database.
SELECT 1 WHERE 0;

-- name: any_work
SELECT 1 FROM genba.job WHERE namespace = :namespace AND queue IN (SELECT value FROM json_each(:queues)) AND state = 'waiting' AND parked_on IS NULL
   AND task IN (SELECT value FROM json_each(:tasks)) LIMIT 1;

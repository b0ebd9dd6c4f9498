-- name: now
SELECT /* now */;

-- name: enqueue_one
-- Nothing, if an operator has changed the rules since :epoch.  Whom to wake up (:call) is not asked here.
INSERT INTO genba.job (id, created_at, due_at, due_from, rank, state, expires_at, unique_until, parent_id, priority,
                       open_deps, once_waiting, namespace, queue, task, key, key_hash, tags, options, args)
SELECT :id, /* now */,
        CASE WHEN CAST(:due_at AS bigint) > /* now */ THEN CAST(:due_at AS bigint) ELSE /* now */ + CAST(:delay AS bigint) END,
        CASE WHEN CAST(:due_at AS bigint) > /* now */ THEN 0 END,
        CASE WHEN CAST(:due_at AS bigint) > /* now */ THEN CAST(:due_at AS bigint) ELSE /* now */ + CAST(:delay AS bigint) END - CAST(:boost AS bigint),
        CASE WHEN CAST(:open_deps AS bigint) > 0 THEN 'blocked'
             WHEN CAST(:due_at AS bigint) > /* now */ OR CAST(:delay AS bigint) > 0 THEN 'scheduled'
             ELSE 'waiting' END,
        COALESCE(CAST(:expires_at AS bigint), /* now */ + CAST(:expires_in AS bigint)), /* now */ + CAST(:unique_for AS bigint), :parent_id, :priority,
        :open_deps, :once_waiting, :namespace, :queue, :task, :key, :key_hash, :tags, :options, CASE WHEN :long THEN x'' ELSE :args END
  FROM genba.namespace s WHERE s.name = :namespace AND (:epoch IS NULL OR s.epoch = :epoch)
    ON CONFLICT (namespace, key_hash) WHERE key_hash IS NOT NULL DO NOTHING
RETURNING id, state;

-- name: enqueue_simple
-- A job of which nothing is said but what it does, as most are. The second column: how many nodes are to be called.
INSERT INTO genba.job (id, created_at, due_at, rank, state, priority, namespace, queue, task, options, args)
SELECT :id, /* now */, /* now */, /* now */ - :boost, 'waiting', :priority, s.name, :queue, :task, :options, :args
  FROM genba.namespace s WHERE s.name = :namespace AND (:epoch IS NULL OR s.epoch = :epoch)
RETURNING id, 1;

-- name: claim_this
-- By a person: neither the moment nor the queue's order nor a limit holds for it.
UPDATE genba.job
   SET state = 'running', attempt = attempt + 1, claim_id = :claim, node = :node, claimed_at = /* now */, started_mark = NULL,
       parked_on = NULL, key_hash = CASE WHEN once_waiting THEN NULL ELSE key_hash END
 WHERE id = :id AND namespace = :namespace AND state IN ('waiting', 'scheduled', 'held')
   AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live' AND n.lease_until > /* boot */)
RETURNING rank, id, attempt, task, /* args */, options, priority, retries, crashes, losses, saved, due_at, open_deps, claimed_at, expires_at, queue, buckets;

-- name: of_claim
-- What a claim has taken whose answer was lost.
SELECT rank, id, attempt, task, /* args */, options, priority, retries, crashes, losses, saved, due_at, open_deps, claimed_at, expires_at, queue, buckets
  FROM genba.job WHERE node = :node AND claim_id = :claim;

-- name: dedicated_ahead
-- Among the next few hundred only: a look at all that wait would cost too much, and what is behind them comes nearer.
SELECT id, task FROM (SELECT id, task, rank, options FROM genba.job
                       WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
                       ORDER BY rank, id LIMIT 500) AS ahead
 WHERE options LIKE :mark ORDER BY rank, id;

-- name: claim_one
UPDATE genba.job
   SET state = 'running', attempt = attempt + 1, claim_id = :claim, node = :node, claimed_at = /* now */, started_mark = NULL,
       key_hash = CASE WHEN once_waiting THEN NULL ELSE key_hash END
 WHERE id IN (SELECT id FROM genba.job WHERE id = :id AND state = 'waiting' AND parked_on IS NULL /* lock */)
   AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live' AND n.lease_until > /* boot */)
   AND EXISTS (SELECT 1 FROM genba.namespace s WHERE s.name = :namespace AND s.epoch = CAST(:epoch AS bigint))
RETURNING rank, id, attempt, task, /* args */, options, priority, retries, crashes, losses, saved, due_at, open_deps, claimed_at, expires_at, queue, buckets;

-- name: with_identity
SELECT id, state, unique_until FROM genba.job WHERE namespace = :namespace AND key_hash = :key_hash;

-- name: forget_identity
UPDATE genba.job SET key_hash = NULL WHERE id = :id;

-- name: add_tags(name, job_id)
INSERT INTO genba.tag (namespace, name, job_id) VALUES (:namespace, :name, :job_id) ON CONFLICT DO NOTHING;

-- name: job
SELECT {columns} FROM genba.job WHERE id = :id AND namespace = :namespace;

-- name: job_by_key
-- The open one, else the newest.
SELECT {columns} FROM genba.job WHERE namespace = :namespace AND key = :key
 ORDER BY CASE WHEN state IN ('succeeded', 'failed', 'timed_out', 'cancelled') THEN 1 ELSE 0 END, created_at DESC, id DESC LIMIT 1;

-- name: attempts
SELECT attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak, error, log
  FROM {history} AS h WHERE job_id = :id ORDER BY attempt;

-- name: cancel
-- What has not started ends at once; what runs is asked to.
UPDATE genba.job
   SET state = 'cancelled', reason = :reason, finished_at = /* now */, parked_on = NULL, version = version % 2000000000 + 1,
       key_hash = CASE WHEN unique_until > /* now */ THEN key_hash END
 WHERE id = :id AND namespace = :namespace AND state IN ('blocked', 'scheduled', 'waiting', 'held')
RETURNING id, schedule_id;

-- name: ask_to_stop
UPDATE genba.job
   SET cancel_requested = CASE WHEN cancel_requested = 'kill' THEN 'kill' ELSE :how END,
       reason = COALESCE(CAST(:reason AS text), reason)
 WHERE id IN (SELECT id FROM genba.job WHERE id = :id AND namespace = :namespace AND state = 'running' /* lock */)
RETURNING node, attempt;

-- name: who_runs
SELECT node, attempt FROM genba.job WHERE id = :id AND namespace = :namespace AND state = 'running';

-- name: command
INSERT INTO genba.control (node, at, job_id, attempt, verb, data) VALUES (:node, /* now */, :job_id, :attempt, :verb, :data);

-- name: hold
UPDATE genba.job SET state = 'held', reason = :reason, parked_on = NULL, version = version % 2000000000 + 1
 WHERE id = :id AND namespace = :namespace AND state IN ('blocked', 'scheduled', 'waiting')
RETURNING id;

-- name: resume
-- By the facts: what it waited for may still be open, its moment may lie ahead, and not only of a clock that was set back.
UPDATE genba.job
   SET state = CASE WHEN open_deps > 0 THEN 'blocked' WHEN due_at > /* now */ AND due_at > COALESCE(due_from, created_at) THEN 'scheduled' ELSE 'waiting' END,
       rank = CASE WHEN fair_key IS NULL THEN due_at - {boost} ELSE 9223372036854775807 END, reason = NULL, crashes = 0, losses = 0, version = version % 2000000000 + 1
 WHERE id = :id AND namespace = :namespace AND state = 'held'
RETURNING state;

-- name: requeue
-- Counters start anew, the attempts so far stay in the history; a checkpoint stays, unless all was done.
UPDATE genba.job
   SET state = CASE WHEN open_deps > 0 THEN 'blocked' ELSE 'waiting' END, due_at = /* now */, due_from = /* now */,
       rank = CASE WHEN fair_key IS NULL THEN /* now */ - {boost} ELSE 9223372036854775807 END,
       retries = 0, crashes = 0, losses = 0, reason = NULL, error = NULL, result = NULL, progress = NULL, finished_at = NULL,
       saved = CASE WHEN state <> 'succeeded' THEN saved END,
       cancel_requested = NULL, granted_at = NULL, expires_at = NULL, key_hash = NULL, started_mark = NULL, version = version % 2000000000 + 1
 WHERE id = :id AND namespace = :namespace AND state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
RETURNING state;

-- name: file_run
-- What its own row has told of the last attempt, before the next one is told there.
INSERT INTO genba.attempt (job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak)
SELECT id, attempt, claimed_at, ran_from, ran_until, 'returned', ran_on, ran_pid, ran_cpu, ran_peak
  FROM genba.job WHERE id = :id AND ran_until IS NOT NULL
    ON CONFLICT DO NOTHING;

-- name: forget_run
UPDATE genba.job SET ran_on = NULL, ran_from = NULL, ran_until = NULL, ran_pid = NULL, ran_cpu = NULL, ran_peak = NULL
 WHERE id = :id AND ran_until IS NOT NULL;

-- name: next_due
SELECT min(due_at) FROM genba.job WHERE namespace = :namespace AND state = 'scheduled';

-- name: expire
UPDATE genba.job SET state = 'cancelled', reason = 'expired', finished_at = /* now */, parked_on = NULL,
       key_hash = CASE WHEN unique_until > /* now */ THEN key_hash END
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND expires_at <= /* now */ AND finished_at IS NULL
                 AND state IN ('blocked', 'scheduled', 'waiting') LIMIT 500 /* lock */)
RETURNING id, schedule_id;

-- name: unpark
UPDATE genba.job SET parked_on = NULL
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND parked_on = :parked_on
               ORDER BY rank, id LIMIT 1000 /* lock */)
RETURNING id, buckets;

-- name: parked_among(reason)
-- Those of these that jobs are parked on: as many looks as there are names, and not as there are lines.
SELECT :reason WHERE EXISTS (SELECT 1 FROM genba.job WHERE namespace = :namespace AND parked_on = :reason);

-- name: ahead
SELECT count(*) FROM (SELECT 1 FROM genba.job WHERE namespace = :namespace AND queue = :queue AND state = 'waiting'
                         AND parked_on IS NULL AND (rank < :rank OR rank = :rank AND id < :id) LIMIT 10000) AS front;

-- name: prune
-- Not while somebody who waits for it, or will read its result, is open.
-- The state is asked for twice: when a requeue has come between, only the outer question is asked again.
DELETE FROM genba.job
 WHERE id IN (SELECT j.id FROM genba.job j
               WHERE j.namespace = :namespace AND j.finished_at < :before
                 AND NOT EXISTS (SELECT 1 FROM genba.dependency d JOIN genba.job c ON c.id = d.child_id
                                  WHERE d.parent_id = j.id AND c.finished_at IS NULL)
               ORDER BY j.finished_at LIMIT 500)
   AND state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
RETURNING id;

-- name: ended_since
-- literal: limit
SELECT id, task, state, finished_at FROM genba.job
 WHERE namespace = :namespace AND finished_at >= :since AND finished_at < :before AND (finished_at > :since OR id > :id)
 ORDER BY finished_at, id LIMIT :limit;

-- name: prune_these
-- Those of them that nobody who is open needs, as `prune` does.
DELETE FROM genba.job
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
   AND NOT EXISTS (SELECT 1 FROM genba.dependency d JOIN genba.job c ON c.id = d.child_id
                    WHERE d.parent_id = genba.job.id AND c.finished_at IS NULL)
RETURNING id;

-- name: prune_attempts(job_id)
DELETE FROM genba.attempt WHERE job_id = :job_id;

-- name: prune_tags(job_id)
DELETE FROM genba.tag WHERE job_id = :job_id;

-- name: put_apart(job_id, args)
INSERT INTO genba.argument (job_id, args) VALUES (:job_id, :args);

-- name: prune_arguments(job_id)
DELETE FROM genba.argument WHERE job_id = :job_id;

-- name: prune_edges(job_id)
DELETE FROM genba.dependency WHERE child_id = :job_id;

-- name: enqueue_one_event
INSERT INTO genba.event (at, namespace, kind, job_id, node) SELECT /* now */, :namespace, :kind, :job_id, :node WHERE NOT :quiet;

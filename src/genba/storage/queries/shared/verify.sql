-- Read in one snapshot, row by row, so that memory does not grow with the number of rows.

-- name: verify_since
SELECT pruned FROM genba.namespace WHERE name = :namespace;

-- name: verify_events
SELECT at, kind, job_id, data FROM genba.event WHERE namespace = :namespace ORDER BY seq;

-- name: verify_jobs
SELECT id, state, attempt, claim_id, node, finished_at, open_deps, parked_on, reason, options,
       buckets, granted_at, claimed_at, ran_until
  FROM genba.job WHERE namespace = :namespace ORDER BY id;

-- name: verify_attempts
-- Leaves out attempts that are recorded in their job's row. Includes attempts whose job is gone, of
-- any namespace.
SELECT a.job_id, a.attempt, a.claimed_at, a.ended_at, a.cause, j.id IS NOT NULL
  FROM genba.attempt a LEFT JOIN genba.job j ON j.id = a.job_id
 WHERE j.id IS NULL OR j.namespace = :namespace
 ORDER BY a.job_id, a.attempt;

-- name: verify_edges
SELECT d.child_id, count(*) FROM genba.dependency d WHERE d.state = 'open' GROUP BY d.child_id
 ORDER BY d.child_id;

-- name: verify_buckets
SELECT b.name, b.taken, b.ordered, b.per, b.owner FROM genba.bucket b WHERE b.namespace = :namespace
 ORDER BY b.name;

-- name: verify_limits
SELECT template, CASE WHEN most > COALESCE(override, n) THEN most ELSE COALESCE(override, n) END
  FROM genba.bucket_limit WHERE namespace = :namespace AND per IS NULL;

-- name: verify_runs
-- Every attempt that needed slots, running ones too. The last attempt cannot have ended after its
-- end was written.
SELECT j.id, j.buckets, CASE WHEN a.started_at > a.claimed_at THEN a.started_at
       ELSE a.claimed_at END AS began,
       CASE WHEN a.attempt = j.attempt AND j.finished_at < a.ended_at THEN j.finished_at
           ELSE a.ended_at END AS ended
  FROM {history} AS a JOIN genba.job j ON j.id = a.job_id
 WHERE j.namespace = :namespace AND j.buckets IS NOT NULL AND a.claimed_at IS NOT NULL
 UNION ALL
SELECT id, buckets, claimed_at, NULL FROM genba.job
 WHERE namespace = :namespace AND buckets IS NOT NULL AND claim_id IS NOT NULL
   AND granted_at IS NOT NULL
 ORDER BY began;

-- name: verify_ticks
-- A run that was withdrawn before it began leaves its moment to another run.
SELECT s.name, j.moment, min(j.id), max(j.id) FROM genba.job j
  JOIN genba.schedule s ON s.id = j.schedule_id
 WHERE j.namespace = :namespace AND j.schedule_id IS NOT NULL AND j.moment IS NOT NULL
   AND j.attempt > 0
 GROUP BY s.name, j.moment HAVING count(*) > 1 ORDER BY s.name, j.moment;

-- name: verify_file
-- Only SQLite checks its file.
SELECT 'ok';

-- name: verify_arguments
-- Only SQLite stores long arguments in a table of their own.
SELECT 0, '' WHERE :namespace = '';

-- name: lock_schedule
-- A concurrent holder releases the row soon.
SELECT id, name, task, definition, args, owner, next_at, paused, reason, runs, failures, version,
       seen_at, deleted
  FROM genba.schedule WHERE id = :id FOR UPDATE;

-- name: lock_unstarted_runs
-- Locks jobs before their schedule, in the same order as a transaction that ends a job.
SELECT id FROM genba.job WHERE schedule_id = :id AND finished_at IS NULL
       AND state IN ('blocked', 'scheduled', 'waiting') ORDER BY id FOR UPDATE;

-- name: scheduled_among(id, attempt, claim)
SELECT j.id, j.retries, j.crashes, j.losses FROM genba.job j
  JOIN unnest(:id, :attempt, :claim) AS e (id, attempt, claim) ON j.id = e.id
 WHERE j.attempt = e.attempt AND j.claim_id = e.claim AND j.schedule_id IS NOT NULL
   AND j.cancel_requested IS NULL;

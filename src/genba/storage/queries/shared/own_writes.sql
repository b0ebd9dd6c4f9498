-- name: own
SELECT id, attempt, claim_id, started_mark, claimed_at, priority, retries, crashes, losses, options, cancel_requested, task, node
  FROM genba.job WHERE id = :id AND attempt = :attempt AND claim_id = :claim;

-- name: save
UPDATE genba.job SET saved = :saved WHERE id = :id AND attempt = :attempt AND claim_id = :claim RETURNING id;

-- name: has_ended
SELECT 1 FROM {history} AS h WHERE job_id = :id AND attempt = :attempt;

-- name: keep_log
UPDATE genba.attempt SET log = :log WHERE job_id = :id AND attempt = :attempt;

-- name: plan_as_ever
-- There is one plan only.

-- name: mark_late(id, attempt, claim, started)
UPDATE genba.job SET started_mark = :started
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim AND started_mark IS NULL
RETURNING id, options;

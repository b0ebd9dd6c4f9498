-- name: own_job
SELECT id, attempt, claim_id, started_mark, claimed_at, priority, retries, crashes, losses, options,
       cancel_requested, task, node
  FROM genba.job WHERE id = :id AND attempt = :attempt AND claim_id = :claim;

-- name: save_checkpoint
UPDATE genba.job SET saved = :saved WHERE id = :id AND attempt = :attempt AND claim_id = :claim
RETURNING id;

-- name: attempt_has_ended
SELECT 1 FROM {history} AS h WHERE job_id = :id AND attempt = :attempt;

-- name: save_log
UPDATE genba.attempt SET log = :log WHERE job_id = :id AND attempt = :attempt;

-- name: restore_planner
-- Not needed: the settings do not exist on this engine.

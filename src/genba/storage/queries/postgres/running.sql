-- name: mark_started(id, attempt, claim, started)
-- The same mark may be set twice, because the answer to the first time may be lost.
UPDATE genba.job AS j SET started_mark = e.started
  FROM unnest(:id, :attempt, :claim, :started) AS e (id, attempt, claim, started)
 WHERE j.id = e.id AND j.attempt = e.attempt AND j.claim_id = e.claim
   AND (j.started_mark IS NULL OR j.started_mark = e.started)
RETURNING j.id, j.options;

-- name: mark_started_late(id, attempt, claim, started)
-- Skips a job that has locked its own row: the node must not wait for it.
UPDATE genba.job AS j SET started_mark = e.started
  FROM unnest(:id, :attempt, :claim, :started) AS e (id, attempt, claim, started)
 WHERE j.id = e.id AND j.attempt = e.attempt AND j.claim_id = e.claim AND j.started_mark IS NULL
   AND j.id = ANY(ARRAY(SELECT id FROM genba.job WHERE id = ANY(:id) FOR UPDATE SKIP LOCKED))
RETURNING j.id, j.options;

-- name: set_progress(id, attempt, claim, progress)
-- Skips a job that has locked its own row: the node must not wait for it.
UPDATE genba.job AS j SET progress = e.progress
  FROM unnest(:id, :attempt, :claim, :progress) AS e (id, attempt, claim, progress)
 WHERE j.id = e.id AND j.attempt = e.attempt AND j.claim_id = e.claim
   AND j.id = ANY(ARRAY(SELECT id FROM genba.job WHERE id = ANY(:id) FOR UPDATE SKIP LOCKED))
RETURNING j.id, j.options;

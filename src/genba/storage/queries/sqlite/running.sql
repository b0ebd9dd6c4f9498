-- name: mark_started(id, attempt, claim, started)
-- The same mark may be set twice, because the answer to the first time may be lost.
UPDATE genba.job SET started_mark = :started
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim
   AND (started_mark IS NULL OR started_mark = :started)
RETURNING id, options;

-- name: set_progress(id, attempt, claim, progress)
UPDATE genba.job SET progress = :progress
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim RETURNING id, options;

-- name: mark_started_late(id, attempt, claim, started)
UPDATE genba.job SET started_mark = :started
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim AND started_mark IS NULL
RETURNING id, options;

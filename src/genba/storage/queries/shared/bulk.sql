-- name: delete_job(id)
DELETE FROM genba.job WHERE id = :id AND namespace = :namespace AND state <> 'running' RETURNING id;

-- name: changeable
SELECT version, priority, due_at, due_from, expires_at, crashes, queue, options FROM genba.job
 WHERE id = :id AND namespace = :namespace AND state IN ('blocked', 'scheduled', 'waiting', 'held');

-- name: change_job
-- A job that is put off leaves its place; one that is parked and still due stays parked.
-- Only a new moment moves it: the old one may lie ahead because the clock was set back.
UPDATE genba.job
   SET queue = :queue, priority = :priority, due_at = :due_at, due_from = :due_from, expires_at = :expires_at, rank = CASE WHEN fair_key IS NULL THEN CAST(:rank AS bigint) ELSE 9223372036854775807 END, options = :options,
       state = CASE WHEN state NOT IN ('scheduled', 'waiting') OR NOT CAST(:moved AS boolean) THEN state WHEN CAST(:due_at AS bigint) > /* now */ THEN 'scheduled' ELSE 'waiting' END,
       parked_on = CASE WHEN state = 'waiting' AND (NOT CAST(:moved AS boolean) OR CAST(:due_at AS bigint) <= /* now */) THEN parked_on END,
       version = version % 2000000000 + 1
 WHERE id = :id AND version = :version AND state IN ('blocked', 'scheduled', 'waiting', 'held')
RETURNING id;

-- name: unknown_in_front
-- Reads only the front that the next claims will meet: reading a backlog of millions takes seconds.
SELECT id FROM (SELECT id, task FROM genba.job WHERE namespace = :namespace AND queue = :queue
                AND state = 'waiting' AND parked_on IS NULL
                 ORDER BY rank, id LIMIT :front) AS ahead
 WHERE NOT (task = ANY(:tasks));

-- name: park_unknown
UPDATE genba.job AS j SET parked_on = 'unknown task ' || j.task
 WHERE j.id = ANY(ARRAY(SELECT id FROM genba.job WHERE id = ANY(:ids) AND state = 'waiting'
                        AND parked_on IS NULL
                           AND NOT (task = ANY(:tasks)) FOR UPDATE SKIP LOCKED));

-- name: parked_on_reasons(reason)
SELECT e.reason FROM unnest(:reason) AS e (reason)
 WHERE EXISTS (SELECT 1 FROM genba.job WHERE namespace = :namespace AND parked_on = e.reason);

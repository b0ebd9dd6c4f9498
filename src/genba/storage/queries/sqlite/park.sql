-- name: unknown_in_front
-- Reads only the front that the next claims will meet: reading a backlog of millions takes seconds.
SELECT id FROM (SELECT id, task FROM genba.job WHERE namespace = :namespace AND queue = :queue
                AND state = 'waiting' AND parked_on IS NULL
                 ORDER BY rank, id LIMIT :front)
 WHERE task NOT IN (SELECT value FROM json_each(:tasks));

-- name: park_unknown
UPDATE genba.job SET parked_on = 'unknown task ' || task
 WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'waiting' AND parked_on IS NULL
   AND task NOT IN (SELECT value FROM json_each(:tasks));

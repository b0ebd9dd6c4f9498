-- name: unpark
UPDATE genba.job SET parked_on = NULL
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND parked_on = :parked_on
               ORDER BY rank, id LIMIT 1000 /* lock */)
RETURNING id, buckets;

-- name: parked_on_reasons(reason)
-- Those of these reasons on which jobs are parked: one lookup per reason, however many reasons the
-- table has.
SELECT :reason WHERE EXISTS (SELECT 1 FROM genba.job WHERE namespace = :namespace
                             AND parked_on = :reason);

-- name: park_task
UPDATE genba.job SET parked_on = :parked_on
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND queue = :queue
              AND state = 'waiting' AND parked_on IS NULL
                 AND task = :task AND (rank, id) > (:rank, :id)
               ORDER BY rank, id LIMIT 2000 /* lock */)
RETURNING rank, id;

-- name: parked_reasons
SELECT parked_on, queue, count(*) FROM genba.job
 WHERE namespace = :namespace AND parked_on IS NOT NULL GROUP BY parked_on, queue;

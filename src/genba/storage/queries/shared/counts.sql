-- name: waiting_queues
-- Steps from one queue to the next in the index, however many jobs wait in each.
WITH RECURSIVE queues (name) AS (
    SELECT min(queue) FROM genba.job WHERE namespace = :namespace AND state = 'waiting'
           AND parked_on IS NULL
     UNION ALL
    SELECT (SELECT min(j.queue) FROM genba.job j
             WHERE j.namespace = :namespace AND j.state = 'waiting' AND j.parked_on IS NULL
               AND j.queue > queues.name)
      FROM queues WHERE queues.name IS NOT NULL)
SELECT name FROM queues WHERE name IS NOT NULL;

-- name: count_waiting
-- literal: limit
SELECT CAST(:queue AS text), task, count(*), min(due_at)
  FROM (SELECT task, due_at FROM genba.job
         WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
         ORDER BY rank, id LIMIT :limit) AS front
 GROUP BY task;

-- name: count_parked
-- literal: limit
SELECT queue, task, count(*), min(due_at)
  FROM (SELECT queue, task, due_at FROM genba.job WHERE namespace = :namespace
        AND parked_on IS NOT NULL
         ORDER BY parked_on, rank, id LIMIT :limit) AS front
 GROUP BY queue, task;

-- name: count_scheduled
-- literal: limit
SELECT queue, task, count(*), min(due_at)
  FROM (SELECT queue, task, due_at FROM genba.job WHERE namespace = :namespace
        AND state = 'scheduled'
         ORDER BY due_at LIMIT :limit) AS front
 GROUP BY queue, task;

-- name: count_running
-- literal: limit
SELECT queue, task, count(*), min(due_at)
  FROM (SELECT queue, task, due_at FROM genba.job WHERE node IS NOT NULL AND namespace = :namespace
        LIMIT :limit) AS front
 GROUP BY queue, task;

-- name: count_blocked_or_held
-- literal: limit
SELECT queue, task, count(*), min(due_at)
  FROM (SELECT queue, task, due_at FROM genba.job
         WHERE namespace = :namespace AND state = :state AND state IN ('blocked', 'held')
         ORDER BY queue, task LIMIT :limit) AS front
 GROUP BY queue, task;

-- name: count_locks
-- literal: limit
SELECT (SELECT count(*) FROM (SELECT 1 FROM genba.lock WHERE namespace = :namespace
                              LIMIT :limit) AS taken),
       count(*), min(since)
  FROM (SELECT since FROM genba.waiter WHERE namespace = :namespace LIMIT :limit) AS lines;

-- name: recent_runs
-- Among the last few hundred that ended: an index by task would cost every finish.
SELECT avg(a.ended_at - a.started_at)
  FROM (SELECT id, attempt, task, queue FROM genba.job WHERE namespace = :namespace AND finished_at IS NOT NULL
         ORDER BY finished_at DESC LIMIT 300) AS j
  JOIN genba.attempt a ON a.job_id = j.id AND a.attempt = j.attempt
 WHERE a.started_at IS NOT NULL AND a.cause = 'returned'
   AND (CAST(:task AS text) IS NULL OR j.task = :task) AND (CAST(:queue AS text) IS NULL OR j.queue = :queue);

-- name: next_kind
-- In two steps: (queue, task) > (…) as one comparison makes SQLite walk the rest of the queue.
SELECT queue, task FROM (
    SELECT * FROM (SELECT queue, task FROM genba.job
                    WHERE namespace = :namespace AND state = 'succeeded' AND queue = :queue AND task > :task
                    ORDER BY task LIMIT 1) AS here
    UNION ALL
    SELECT * FROM (SELECT queue, task FROM genba.job
                    WHERE namespace = :namespace AND state = 'succeeded' AND queue > :queue
                    ORDER BY queue, task LIMIT 1) AS behind
) AS next ORDER BY queue, task LIMIT 1;

-- name: ends_of_ids
SELECT (SELECT min(id) FROM genba.job), (SELECT max(id) FROM genba.job);

-- name: enqueued_behind
SELECT id, created_at FROM genba.job WHERE id >= :id ORDER BY id LIMIT 1;

-- name: busy_nodes
SELECT node, count(*) FROM genba.job WHERE node IS NOT NULL GROUP BY node;

-- name: count_tagged
SELECT count(*) FROM (SELECT 1 FROM genba.tag WHERE namespace = :namespace AND name = :name LIMIT :limit) AS part;

-- name: job
SELECT {columns} FROM genba.job WHERE id = :id AND namespace = :namespace;

-- name: job_by_key
-- The open job with this key, or else the newest.
SELECT {columns} FROM genba.job WHERE namespace = :namespace AND key = :key
 ORDER BY CASE WHEN state IN ('succeeded', 'failed', 'timed_out', 'cancelled') THEN 1 ELSE 0 END,
     created_at DESC, id DESC LIMIT 1;

-- name: attempts
SELECT attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak, error, log
  FROM {history} AS h WHERE job_id = :id ORDER BY attempt;

-- name: state_of_job
SELECT state FROM genba.job WHERE id = :id AND namespace = :namespace;

-- name: count_ahead
SELECT count(*) FROM (SELECT 1 FROM genba.job WHERE namespace = :namespace AND queue = :queue
                      AND state = 'waiting'
                         AND parked_on IS NULL AND (rank < :rank OR rank = :rank AND id < :id)
                             LIMIT 10000) AS front;

-- name: average_duration
-- Of the last few hundred jobs that ended: an index by task would slow down every finish.
-- Reads the attempt of each job on its own: with a join, SQLite reads the whole history.
SELECT avg(COALESCE(j.ran_until - j.ran_from, (SELECT a.ended_at - a.started_at FROM genba.attempt a
                                                WHERE a.job_id = j.id AND a.attempt = j.attempt
                                                  AND a.cause = 'returned')))
  FROM (SELECT id, attempt, task, queue, ran_from, ran_until FROM genba.job
        WHERE namespace = :namespace AND finished_at IS NOT NULL
         ORDER BY finished_at DESC LIMIT 300) AS j
 WHERE (CAST(:task AS text) IS NULL OR j.task = :task)
   AND (CAST(:queue AS text) IS NULL OR j.queue = :queue);

-- name: queues_and_tasks
-- Each row is found behind the previous one in the index: the next task of its queue, or the next
-- queue with an empty task.
-- The first row's empty task is cut out of a real one: a plain '' would have another collation than
-- the column.
WITH RECURSIVE kind (queue, task) AS (
    SELECT (SELECT j.queue FROM genba.job AS j WHERE j.namespace = :namespace
            AND j.state = 'succeeded'
             ORDER BY j.queue LIMIT 1),
           (SELECT substr(j.task, 1, 0) FROM genba.job AS j WHERE j.namespace = :namespace
            AND j.state = 'succeeded'
             ORDER BY j.queue LIMIT 1)
    UNION ALL
    SELECT CASE WHEN EXISTS (SELECT 1 FROM genba.job AS j WHERE j.namespace = :namespace
                             AND j.state = 'succeeded'
                                AND j.queue = kind.queue AND j.task > kind.task)
                THEN kind.queue
                ELSE (SELECT j.queue FROM genba.job AS j WHERE j.namespace = :namespace
                      AND j.state = 'succeeded'
                         AND j.queue > kind.queue ORDER BY j.queue LIMIT 1) END,
           COALESCE((SELECT j.task FROM genba.job AS j WHERE j.namespace = :namespace
                     AND j.state = 'succeeded'
                        AND j.queue = kind.queue AND j.task > kind.task ORDER BY j.task LIMIT 1),
                            '')
      FROM kind WHERE kind.queue IS NOT NULL
)
SELECT queue, task FROM kind WHERE task <> '' LIMIT :limit;

-- name: first_id_since
-- Halves the range of ids until it finds the first job that was enqueued at that moment or later.
WITH RECURSIVE half (low, high) AS (
    SELECT (SELECT min(id) FROM genba.job), (SELECT max(id) + 1 FROM genba.job)
    UNION ALL
    SELECT CASE WHEN (SELECT created_at FROM genba.job WHERE id >= (low + high) / 2 ORDER BY id
                      LIMIT 1) < :moment
                THEN (low + high) / 2 + 1 ELSE low END,
           CASE WHEN (SELECT created_at FROM genba.job WHERE id >= (low + high) / 2 ORDER BY id
                      LIMIT 1) < :moment
                THEN high ELSE (low + high) / 2 END
      FROM half WHERE low < high
)
SELECT low FROM half WHERE low >= high;

-- name: busy_nodes
SELECT node, count(*) FROM genba.job WHERE node IS NOT NULL GROUP BY node;

-- name: count_tagged
SELECT count(*) FROM (SELECT 1 FROM genba.tag WHERE namespace = :namespace AND name = :name
                      LIMIT :limit) AS part;

-- name: count_succeeded
SELECT count(*) FROM (SELECT 1 FROM genba.job WHERE namespace = :namespace AND state = 'succeeded'
                      AND queue = :queue
                         AND task = :task LIMIT :limit) AS part;

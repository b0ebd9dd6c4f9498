-- name: recent_runs
-- Among the last few hundred that ended: an index by task would cost every finish.
-- Each is asked for its own record: joined to all of the history, SQLite reads all of it.
SELECT avg(COALESCE(j.ran_until - j.ran_from, (SELECT a.ended_at - a.started_at FROM genba.attempt a
                                                WHERE a.job_id = j.id AND a.attempt = j.attempt AND a.cause = 'returned')))
  FROM (SELECT id, attempt, task, queue, ran_from, ran_until FROM genba.job WHERE namespace = :namespace AND finished_at IS NOT NULL
         ORDER BY finished_at DESC LIMIT 300) AS j
 WHERE (CAST(:task AS text) IS NULL OR j.task = :task) AND (CAST(:queue AS text) IS NULL OR j.queue = :queue);

-- name: kinds
-- Each is found behind the last one in the index: the next task of its queue, or, with no task yet, the next queue.
-- The first has no task either, cut out of one: a plain '' would have another collation than the column.
WITH RECURSIVE kind (queue, task) AS (
    SELECT (SELECT j.queue FROM genba.job AS j WHERE j.namespace = :namespace AND j.state = 'succeeded'
             ORDER BY j.queue LIMIT 1),
           (SELECT substr(j.task, 1, 0) FROM genba.job AS j WHERE j.namespace = :namespace AND j.state = 'succeeded'
             ORDER BY j.queue LIMIT 1)
    UNION ALL
    SELECT CASE WHEN EXISTS (SELECT 1 FROM genba.job AS j WHERE j.namespace = :namespace AND j.state = 'succeeded'
                                AND j.queue = kind.queue AND j.task > kind.task)
                THEN kind.queue
                ELSE (SELECT j.queue FROM genba.job AS j WHERE j.namespace = :namespace AND j.state = 'succeeded'
                         AND j.queue > kind.queue ORDER BY j.queue LIMIT 1) END,
           COALESCE((SELECT j.task FROM genba.job AS j WHERE j.namespace = :namespace AND j.state = 'succeeded'
                        AND j.queue = kind.queue AND j.task > kind.task ORDER BY j.task LIMIT 1), '')
      FROM kind WHERE kind.queue IS NOT NULL
)
SELECT queue, task FROM kind WHERE task <> '' LIMIT :limit;

-- name: first_id
-- Ids are cut in half until the first one is found that was enqueued at the moment or later.
WITH RECURSIVE half (low, high) AS (
    SELECT (SELECT min(id) FROM genba.job), (SELECT max(id) + 1 FROM genba.job)
    UNION ALL
    SELECT CASE WHEN (SELECT created_at FROM genba.job WHERE id >= (low + high) / 2 ORDER BY id LIMIT 1) < :moment
                THEN (low + high) / 2 + 1 ELSE low END,
           CASE WHEN (SELECT created_at FROM genba.job WHERE id >= (low + high) / 2 ORDER BY id LIMIT 1) < :moment
                THEN high ELSE (low + high) / 2 END
      FROM half WHERE low < high
)
SELECT low FROM half WHERE low >= high;

-- name: busy_nodes
SELECT node, count(*) FROM genba.job WHERE node IS NOT NULL GROUP BY node;

-- name: count_tagged
SELECT count(*) FROM (SELECT 1 FROM genba.tag WHERE namespace = :namespace AND name = :name LIMIT :limit) AS part;

-- name: count_done
SELECT count(*) FROM (SELECT 1 FROM genba.job WHERE namespace = :namespace AND state = 'succeeded' AND queue = :queue
                         AND task = :task LIMIT :limit) AS part;

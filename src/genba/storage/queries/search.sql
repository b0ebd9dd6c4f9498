-- name: recent_runs
-- Among the last few hundred that ended: an index by task would cost every finish.
SELECT avg(a.ended_at - a.started_at)
  FROM (SELECT id, attempt, task, queue FROM genba.job WHERE namespace = :namespace AND finished_at IS NOT NULL
         ORDER BY finished_at DESC LIMIT 300) AS j
  JOIN genba.attempt a ON a.job_id = j.id AND a.attempt = j.attempt
 WHERE a.started_at IS NOT NULL AND a.cause = 'returned'
   AND (CAST(:task AS text) IS NULL OR j.task = :task) AND (CAST(:queue AS text) IS NULL OR j.queue = :queue);

-- name: prune
-- Keeps a job while an open job depends on it, or will read its result. The state is tested twice:
-- if a requeue has come in between, only the outer condition is evaluated again.
DELETE FROM genba.job
 WHERE id IN (SELECT j.id FROM genba.job j
               WHERE j.namespace = :namespace AND j.finished_at < :before
                 AND NOT EXISTS (SELECT 1 FROM genba.dependency d
                                 JOIN genba.job c ON c.id = d.child_id
                                  WHERE d.parent_id = j.id AND c.finished_at IS NULL)
               ORDER BY j.finished_at LIMIT 500)
   AND state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
RETURNING id;

-- name: prune_jobs
-- Keeps jobs that an open job depends on, as prune does.
DELETE FROM genba.job
 WHERE id IN (SELECT value FROM json_each(:ids))
   AND state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
   AND NOT EXISTS (SELECT 1 FROM genba.dependency d JOIN genba.job c ON c.id = d.child_id
                    WHERE d.parent_id = genba.job.id AND c.finished_at IS NULL)
RETURNING id;

-- name: prune_attempts(job_id)
DELETE FROM genba.attempt WHERE job_id = :job_id;

-- name: prune_tags(job_id)
DELETE FROM genba.tag WHERE job_id = :job_id;

-- name: prune_arguments(job_id)
DELETE FROM genba.argument WHERE job_id = :job_id;

-- name: prune_edges(job_id)
DELETE FROM genba.dependency WHERE child_id = :job_id;

-- name: prune_messages(job_id)
DELETE FROM genba.message WHERE job_id = :job_id;

-- name: ended_since
-- literal: limit
SELECT id, task, state, finished_at FROM genba.job
 WHERE namespace = :namespace AND finished_at >= :since AND finished_at < :before
   AND (finished_at > :since OR id > :id)
 ORDER BY finished_at, id LIMIT :limit;

-- name: shorten_history
DELETE FROM genba.attempt WHERE job_id = :job_id AND attempt <= :before;

-- name: prune_jobs
DELETE FROM genba.job j
 WHERE j.id = ANY(:ids) AND j.state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
   AND NOT EXISTS (SELECT 1 FROM genba.dependency d JOIN genba.job c ON c.id = d.child_id
                    WHERE d.parent_id = j.id AND c.finished_at IS NULL)
RETURNING j.id;

-- name: prune_attempts(job_id)
DELETE FROM genba.attempt WHERE job_id = ANY(:job_id);

-- name: prune_tags(job_id)
DELETE FROM genba.tag WHERE job_id = ANY(:job_id);

-- name: prune_arguments(job_id)
-- PostgreSQL stores long values outside the row by itself.

-- name: prune_edges(job_id)
DELETE FROM genba.dependency WHERE child_id = ANY(:job_id);

-- name: prune_messages(job_id)
DELETE FROM genba.message WHERE job_id = ANY(:job_id);

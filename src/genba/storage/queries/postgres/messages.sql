-- name: prune_messages(job_id)
DELETE FROM genba.message WHERE job_id = ANY(:job_id);

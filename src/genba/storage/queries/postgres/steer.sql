-- name: delete_job(id)
DELETE FROM genba.job WHERE id = ANY(:id) AND namespace = :namespace AND state <> 'running'
RETURNING id;

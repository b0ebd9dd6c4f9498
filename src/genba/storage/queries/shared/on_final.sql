-- name: jobs_with_hook(id)
SELECT id, queue, priority, options FROM genba.job
 WHERE id = :id AND namespace = :namespace AND options LIKE '%"on_final":%';

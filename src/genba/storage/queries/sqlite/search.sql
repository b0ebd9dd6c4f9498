-- name: jobs_of_ids
SELECT {columns} FROM genba.job WHERE id IN (SELECT value FROM json_each(:ids));

-- name: states(id)
SELECT id, state FROM genba.job WHERE id = :id AND namespace = :namespace;

-- name: jobs_of_ids
SELECT {columns} FROM genba.job WHERE id IN (SELECT value FROM json_each(:ids));

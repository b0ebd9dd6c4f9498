-- name: jobs_of_ids
-- Arrays are its own form of a list.
SELECT {columns} FROM genba.job WHERE id = ANY(:ids);

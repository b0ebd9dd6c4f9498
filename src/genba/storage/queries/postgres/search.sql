-- name: jobs_of_ids
-- An array is PostgreSQL's form of a list.
SELECT {columns} FROM genba.job WHERE id = ANY(:ids);

-- name: states(id)
SELECT id, state FROM genba.job WHERE id = ANY(:id) AND namespace = :namespace;

-- name: verify_file
-- Also checks that every index agrees with its table.
PRAGMA integrity_check(20);

-- name: verify_arguments
SELECT j.id, 'its arguments are gone' FROM genba.job j
 WHERE j.namespace = :namespace AND length(j.args) = 0
   AND NOT EXISTS (SELECT 1 FROM genba.argument a WHERE a.job_id = j.id)
 UNION ALL
SELECT a.job_id, 'it is gone, and its arguments are not' FROM genba.argument a
 WHERE NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = a.job_id);

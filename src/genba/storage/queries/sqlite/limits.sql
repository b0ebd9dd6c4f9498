-- All rows in one value, as in a claim: returning them row by row costs many times as much.

-- name: lock_buckets
SELECT CAST(json_group_array(json_array(name, template, n, ordered, per, burst, taken, owner,
                                        full_at, next_at)) AS BLOB) FROM genba.bucket
 WHERE namespace = :namespace AND name IN (SELECT value FROM json_each(:names));

-- name: first_parked
SELECT CAST(json_group_array(json(head.value)) AS BLOB)
  FROM json_each(:lines) AS line,
       json_each((SELECT json_group_array(json_array(parked_on, id, rank, buckets, state))
                    FROM (SELECT parked_on, id, rank, buckets, state FROM genba.job
                           WHERE namespace = :namespace AND parked_on = line.value
                           ORDER BY rank, id LIMIT :room))) AS head;

-- name: grant_slots
UPDATE genba.job SET parked_on = NULL, granted_at = /* now */
 WHERE id IN (SELECT value FROM json_each(:ids)) AND parked_on IS NOT NULL AND state = 'waiting';

-- name: limited_jobs
SELECT CAST(json_group_array(json_array(id, buckets, granted_at, state)) AS BLOB) FROM genba.job
 WHERE id IN (SELECT value FROM json_each(:ids)) AND buckets IS NOT NULL;

-- name: claim
-- All rows in one value: for each row that SQLite returns, Python releases and retakes its lock,
-- and another thread may keep it.
-- No other transaction writes between this and mark_claimed: both run in one write transaction.
SELECT CAST(json_group_array(json_array(rank, id, attempt + 1, task, CAST(args AS TEXT), options,
                                        priority, retries, crashes, losses, CAST(saved AS TEXT),
                                        due_at, open_deps, /* now */, expires_at, queue,
                                        buckets)) AS BLOB)
  FROM (SELECT * FROM genba.job
         WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
           AND task IN (SELECT value FROM json_each(:tasks))
           AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live'
                       AND n.lease_until > /* boot */)
           AND EXISTS (SELECT 1 FROM genba.namespace s WHERE s.name = :namespace
                       AND s.epoch = :epoch)
         ORDER BY rank, id LIMIT :limit);

-- name: claim_row_by_row
-- The same, for rows whose arguments are not text: another program than genba has written them.
SELECT rank, id, attempt + 1, task, CAST(args AS BLOB), options, priority, retries, crashes, losses,
       CAST(saved AS BLOB), due_at, open_deps, /* now */, expires_at, queue, buckets
  FROM genba.job
 WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
   AND task IN (SELECT value FROM json_each(:tasks))
   AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live'
               AND n.lease_until > /* boot */)
   AND EXISTS (SELECT 1 FROM genba.namespace s WHERE s.name = :namespace AND s.epoch = :epoch)
 ORDER BY rank, id LIMIT :limit;

-- name: mark_claimed
UPDATE genba.job
   SET state = 'running', attempt = attempt + 1, claim_id = :claim, node = :node,
       claimed_at = /* now */, started_mark = NULL,
       key_hash = CASE WHEN once_waiting THEN NULL ELSE key_hash END
 WHERE id IN (SELECT value FROM json_each(:ids));

-- name: long_arguments
SELECT job_id, args FROM genba.argument WHERE job_id IN (SELECT value FROM json_each(:ids));

-- name: any_work
SELECT 1 FROM genba.job WHERE namespace = :namespace
       AND queue IN (SELECT value FROM json_each(:queues)) AND state = 'waiting'
       AND parked_on IS NULL
   AND task IN (SELECT value FROM json_each(:tasks)) LIMIT 1;

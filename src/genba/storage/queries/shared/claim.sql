-- name: claim_waiting_job
UPDATE genba.job
   SET state = 'running', attempt = attempt + 1, claim_id = :claim, node = :node,
       claimed_at = /* now */, started_mark = NULL,
       key_hash = CASE WHEN once_waiting THEN NULL ELSE key_hash END
 WHERE id IN (SELECT id FROM genba.job WHERE id = :id AND state = 'waiting'
              AND parked_on IS NULL /* lock */)
   AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live'
               AND n.lease_until > /* boot */)
   AND EXISTS (SELECT 1 FROM genba.namespace s WHERE s.name = :namespace
               AND s.epoch = CAST(:epoch AS bigint))
RETURNING rank, id, attempt, task, /* args */, options, priority, retries, crashes, losses, saved,
    due_at, open_deps, claimed_at, expires_at, queue, buckets;

-- name: claim_job
-- For a claim by hand: it ignores the due time, the order of the queue and limits.
UPDATE genba.job
   SET state = 'running', attempt = attempt + 1, claim_id = :claim, node = :node,
       claimed_at = /* now */, started_mark = NULL,
       parked_on = NULL, key_hash = CASE WHEN once_waiting THEN NULL ELSE key_hash END
 WHERE id = :id AND namespace = :namespace AND state IN ('waiting', 'scheduled', 'held')
   AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live'
               AND n.lease_until > /* boot */)
RETURNING rank, id, attempt, task, /* args */, options, priority, retries, crashes, losses, saved,
    due_at, open_deps, claimed_at, expires_at, queue, buckets;

-- name: jobs_of_claim
-- Returns the jobs of a claim whose answer was lost.
SELECT rank, id, attempt, task, /* args */, options, priority, retries, crashes, losses, saved,
       due_at, open_deps, claimed_at, expires_at, queue, buckets
  FROM genba.job WHERE node = :node AND claim_id = :claim;

-- name: dedicated_ahead
-- Reads only the next few hundred jobs: reading all waiting jobs would cost too much, and those
-- further back come nearer.
SELECT id, task FROM (SELECT id, task, rank, options FROM genba.job
                       WHERE namespace = :namespace AND queue = :queue AND state = 'waiting'
                         AND parked_on IS NULL
                       ORDER BY rank, id LIMIT 500) AS ahead
 WHERE options LIKE :mark ORDER BY rank, id;

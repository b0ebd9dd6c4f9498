-- name: claim
-- literal: limit
-- ctid = ANY(ARRAY(...)): with a join to the sub-select, the planner hashes the whole table. The
-- row is locked, so it has not moved since the sub-select found it; a search by id would look it up
-- once more. (A row that another transaction changed just before we locked it is not found there,
-- and is left for the next claim.)
-- LIMIT is a literal: with a parameter, a generic plan assumes a tenth of the table.
UPDATE genba.job AS j
   SET state = 'running', attempt = j.attempt + 1, claim_id = :claim, node = :node,
       claimed_at = /* now */, started_mark = NULL,
       key_hash = CASE WHEN j.once_waiting THEN NULL ELSE j.key_hash END
 WHERE j.ctid = ANY(ARRAY(
           SELECT ctid FROM genba.job
            WHERE namespace = :namespace AND queue = :queue AND state = 'waiting'
              AND parked_on IS NULL
              AND task = ANY(:tasks)
              AND EXISTS (SELECT 1 FROM genba.node n WHERE n.id = :node AND n.state = 'live'
                          AND n.lease_until > /* boot */)
              AND EXISTS (SELECT 1 FROM genba.namespace s WHERE s.name = :namespace
                          AND s.epoch = CAST(:epoch AS bigint))
            ORDER BY rank, id LIMIT :limit FOR UPDATE SKIP LOCKED))
RETURNING j.rank, j.id, j.attempt, j.task, j.args, j.options, j.priority, j.retries, j.crashes,
    j.losses, j.saved, j.due_at, j.open_deps, j.claimed_at, j.expires_at, j.queue, j.buckets;

-- name: any_work
SELECT 1 FROM genba.job WHERE namespace = :namespace AND queue = ANY(:queues) AND state = 'waiting'
       AND parked_on IS NULL AND task = ANY(:tasks) LIMIT 1;

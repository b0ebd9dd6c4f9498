-- name: orphans
SELECT id, attempt, claim_id, started_mark, claimed_at, priority, retries, crashes, losses, options,
       cancel_requested, task
  FROM genba.job WHERE node = :node ORDER BY id LIMIT 500 /* lock */;

-- name: dead_nodes_with_jobs
SELECT n.id FROM genba.node n WHERE n.namespace = :namespace AND n.state IN ('dead', 'ended')
   AND EXISTS (SELECT 1 FROM genba.job j WHERE j.node = n.id);

-- name: missing_nodes_with_jobs
-- Nodes whose row has been deleted.
SELECT DISTINCT j.node FROM genba.job j WHERE j.node IS NOT NULL AND j.namespace = :namespace
   AND NOT EXISTS (SELECT 1 FROM genba.node n WHERE n.id = j.node);

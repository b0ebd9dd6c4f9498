-- name: own_job
-- Not SKIP LOCKED: another transaction that holds the row now, perhaps the node's start mark,
-- releases it soon.
SELECT id, attempt, claim_id, started_mark, claimed_at, priority, retries, crashes, losses, options,
       cancel_requested, task, node
  FROM genba.job WHERE id = :id AND attempt = :attempt AND claim_id = :claim FOR UPDATE;

-- name: restore_planner
-- The user's statements ran with the server's planner settings; these settings make our own plans
-- independent of the size of the tables.
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
       set_config('enable_mergejoin', 'off', true);

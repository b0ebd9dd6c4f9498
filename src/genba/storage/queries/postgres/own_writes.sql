-- name: own
-- Not SKIP LOCKED: whoever holds the row just now, the node with its mark perhaps, lets go of it soon.
SELECT id, attempt, claim_id, started_mark, claimed_at, priority, retries, crashes, losses, options, cancel_requested, task, node
  FROM genba.job WHERE id = :id AND attempt = :attempt AND claim_id = :claim FOR UPDATE;

-- name: plan_as_ever
-- The user's statements had the server's own settings; ours need not know the size of the tables.
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true);

-- name: mark_late(id, attempt, claim, started)
-- Not of a job that has locked its own row: the node must not wait for it.
UPDATE genba.job AS j SET started_mark = e.started
  FROM unnest(:id, :attempt, :claim, :started) AS e (id, attempt, claim, started)
 WHERE j.id = e.id AND j.attempt = e.attempt AND j.claim_id = e.claim AND j.started_mark IS NULL
   AND j.id = ANY(ARRAY(SELECT id FROM genba.job WHERE id = ANY(:id) FOR UPDATE SKIP LOCKED))
RETURNING j.id, j.options;

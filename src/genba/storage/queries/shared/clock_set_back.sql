-- name: rates_set_back
-- At most one whole burst can have been taken.
UPDATE genba.bucket SET full_at = /* now */ + per * COALESCE(burst, n) / NULLIF(n, 0),
    next_at = CASE WHEN next_at IS NOT NULL THEN /* now */ END
 WHERE namespace = :namespace
   AND name IN (SELECT name FROM genba.bucket WHERE namespace = :namespace AND per IS NOT NULL
                                              AND full_at > /* now */ + per * COALESCE(burst,
                                                  n) / NULLIF(n, 0) + 1000000
                                                      ORDER BY name /* lock */)
RETURNING name;

-- name: conditions_set_back
-- One check too many does no harm.
UPDATE genba.question SET look_at = /* now */
 WHERE namespace = :namespace
   AND key IN (SELECT key FROM genba.question WHERE namespace = :namespace AND look_at > /* now */
               AND said_at > /* now */
                                           ORDER BY key /* lock */)
RETURNING key;

-- name: calls_set_back
UPDATE genba.waiter SET called_at = /* now */ WHERE namespace = :namespace AND called_at > /* now */
RETURNING seq;

-- name: grants_set_back
UPDATE genba.job SET granted_at = /* now */
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND granted_at > /* now */
              AND claim_id IS NULL AND finished_at IS NULL /* lock */)
RETURNING id;

-- name: waits_set_back
-- Moves all jobs by the same amount, which is how far the last of them was counted ahead of now: no
-- job becomes due early, and their order stays.
UPDATE genba.job
   SET due_at = CASE WHEN due_at <= 0 THEN due_at
       ELSE due_at - (SELECT max(COALESCE(due_from, created_at)) FROM genba.job
                           WHERE namespace = :namespace AND state = 'scheduled'
                             AND (due_from IS NULL OR due_from > 0)) + /* now */ END,
       due_from = COALESCE(due_from, created_at) - (SELECT max(COALESCE(due_from, created_at))
                                                    FROM genba.job
                           WHERE namespace = :namespace AND state = 'scheduled'
                             AND (due_from IS NULL OR due_from > 0)) + /* now */
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND state = 'scheduled'
              AND (due_from IS NULL OR due_from > 0)
                 AND COALESCE(due_from, created_at) > /* now */
                     ORDER BY COALESCE(due_from, created_at) LIMIT 500 /* lock */)
RETURNING id;

-- name: waiting_since_future
-- Leaves out jobs of fair queues, whose rank is not a time.
SELECT id FROM genba.job WHERE namespace = :namespace AND state = 'waiting' AND parked_on IS NULL
       AND fair_key IS NULL AND due_at > /* now */
 UNION ALL
SELECT id FROM genba.job WHERE namespace = :namespace AND parked_on IS NOT NULL AND fair_key IS NULL
       AND due_at > /* now */
 ORDER BY id;

-- name: ranks_set_back(id)
-- Jobs of equal rank start in the order of their ids, so they keep their order.
UPDATE genba.job SET rank = rank - (due_at - /* now */), due_at = /* now */, due_from = /* now */
 WHERE id = :id AND state = 'waiting' AND due_at > /* now */;

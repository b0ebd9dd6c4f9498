-- name: next_due
SELECT min(due_at) FROM genba.job WHERE namespace = :namespace AND state = 'scheduled';

-- name: expire
UPDATE genba.job SET state = 'cancelled', reason = 'expired', finished_at = /* now */,
    parked_on = NULL,
       key_hash = CASE WHEN unique_until > /* now */ THEN key_hash END
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND expires_at <= /* now */
              AND finished_at IS NULL
                 AND state IN ('blocked', 'scheduled', 'waiting') LIMIT 500 /* lock */)
RETURNING id, schedule_id;

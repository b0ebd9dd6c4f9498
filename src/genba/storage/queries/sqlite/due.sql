-- name: promote
UPDATE genba.job SET state = 'waiting',
       rank = CASE WHEN fair_key IS NULL THEN due_at - {boost after crashes}
           ELSE 9223372036854775807 END
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND state = 'scheduled'
              AND due_at <= /* now */
               ORDER BY due_at LIMIT 500)
RETURNING id, state, options, buckets;

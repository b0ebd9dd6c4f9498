-- name: promote
UPDATE genba.job AS j SET state = 'waiting',
       rank = CASE WHEN j.fair_key IS NULL THEN j.due_at - {boost after crashes}
           ELSE 9223372036854775807 END
 WHERE j.id = ANY(ARRAY(SELECT id FROM genba.job WHERE namespace = :namespace
                        AND state = 'scheduled' AND due_at <= /* now */
                         ORDER BY due_at LIMIT 500 FOR UPDATE SKIP LOCKED))
RETURNING j.id, j.state, j.options, j.buckets;

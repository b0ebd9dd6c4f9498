-- name: parents_with_dependents
SELECT DISTINCT parent_id FROM genba.dependency
 WHERE state = 'open' AND parent_id IN (SELECT value FROM json_each(:ids));

-- name: parents_with_open_children
SELECT DISTINCT parent_id FROM genba.job
 WHERE parent_id IN (SELECT value FROM json_each(:ids)) AND finished_at IS NULL;

-- name: unsettled
SELECT u.seq, u.parent_id, j.state FROM genba.unsettled u LEFT
  JOIN genba.job j ON j.id = u.parent_id
 WHERE u.namespace = :namespace AND u.seq > :after ORDER BY u.seq LIMIT 200;

-- name: parent_states
SELECT id, state FROM genba.job WHERE id IN (SELECT value FROM json_each(:ids));

-- name: dependents_of
SELECT parent_id, child_id, wants FROM genba.dependency
 WHERE parent_id IN (SELECT value FROM json_each(:ids)) AND state = 'open' LIMIT 1001;

-- name: meet_edges(parent_id, child_id)
UPDATE genba.dependency SET state = 'met'
 WHERE child_id = :child_id AND parent_id = :parent_id AND state = 'open' RETURNING child_id;

-- name: set_edge_states
UPDATE genba.dependency SET state = :state
 WHERE parent_id = :parent_id AND state = 'open' AND child_id IN (SELECT value FROM json_each(:ids))
RETURNING child_id;

-- name: reduce_open_deps(id, less)
UPDATE genba.job
   SET open_deps = CASE WHEN open_deps > :less THEN open_deps - :less ELSE 0 END,
       state = CASE WHEN open_deps > :less OR state <> 'blocked' THEN state WHEN due_at > /* now */
           AND due_at > COALESCE(due_from, created_at) THEN 'scheduled' ELSE 'waiting' END,
       rank = CASE WHEN open_deps > :less OR state <> 'blocked'
           OR (due_at > /* now */ AND due_at > COALESCE(due_from, created_at)) THEN rank
                   WHEN fair_key IS NOT NULL THEN 9223372036854775807
                       ELSE /* now */ - {boost after crashes} END
 WHERE id = :id AND open_deps > 0
RETURNING id, state, options, open_deps;

-- name: options_of
SELECT id, options FROM genba.job WHERE id IN (SELECT value FROM json_each(:ids));

-- name: unsuccessful_jobs(id)
SELECT id FROM genba.job WHERE id = :id AND namespace = :namespace
       AND state IN ('failed', 'timed_out', 'cancelled')
   AND (reason IS NULL OR reason NOT LIKE 'dependency %');

-- name: parents_with_dependents
SELECT DISTINCT parent_id FROM genba.dependency WHERE parent_id = ANY(:ids) AND state = 'open';

-- name: parents_with_open_children
SELECT DISTINCT parent_id FROM genba.job WHERE parent_id = ANY(:ids) AND finished_at IS NULL;

-- name: unsettled
SELECT u.seq, u.parent_id, j.state
  FROM genba.unsettled u LEFT JOIN LATERAL (SELECT state FROM genba.job p
                                            WHERE p.id = u.parent_id) j ON true
 WHERE u.namespace = :namespace AND u.seq > :after
 ORDER BY u.seq LIMIT 200 FOR UPDATE OF u SKIP LOCKED;

-- name: lock_settling
-- Two transactions at once would lock the rows of shared dependents in different orders, and each
-- would wait for the other.
SELECT pg_advisory_xact_lock(hashtextextended('genba settle ' || CAST(:namespace AS text), 0));

-- name: parent_states
-- Shared locks: a transaction that is just ending a parent has either looked for dependents before
-- us, or will see ours afterwards.
SELECT id, state FROM genba.job WHERE id = ANY(:ids) ORDER BY id FOR SHARE SKIP LOCKED;

-- name: dependents_of
SELECT parent_id, child_id, wants FROM genba.dependency
 WHERE parent_id = ANY(:ids) AND state = 'open' LIMIT 1001;

-- name: meet_edges(parent_id, child_id)
UPDATE genba.dependency d SET state = 'met'
  FROM unnest(:parent_id, :child_id) AS batch (parent_id, child_id)
 WHERE d.child_id = batch.child_id AND d.parent_id = batch.parent_id AND d.state = 'open'
RETURNING d.child_id;

-- name: delete_unsettled(seq)
DELETE FROM genba.unsettled WHERE seq = ANY(:seq);

-- name: set_edge_states
UPDATE genba.dependency SET state = :state
 WHERE parent_id = :parent_id AND state = 'open' AND child_id = ANY(:ids) RETURNING child_id;

-- name: reduce_open_deps(id, less)
UPDATE genba.job j
   SET open_deps = CASE WHEN open_deps > batch.less THEN open_deps - batch.less ELSE 0 END,
       state = CASE WHEN open_deps > batch.less OR state <> 'blocked' THEN state
           WHEN due_at > /* now */ AND due_at > COALESCE(due_from, created_at) THEN 'scheduled'
               ELSE 'waiting' END,
       rank = CASE WHEN open_deps > batch.less OR state <> 'blocked'
           OR (due_at > /* now */ AND due_at > COALESCE(due_from, created_at)) THEN rank
                   WHEN fair_key IS NOT NULL THEN 9223372036854775807
                       ELSE /* now */ - {boost after crashes} END
  FROM unnest(:id, :less) AS batch (id, less)
 WHERE j.id = batch.id AND open_deps > 0
RETURNING j.id, state, options, open_deps;

-- name: options_of
SELECT id, options FROM genba.job WHERE id = ANY(:ids);

-- name: add_edges(child_id, parent_id, wants)
INSERT INTO genba.dependency (child_id, parent_id, wants) SELECT *
  FROM unnest(:child_id, :parent_id, :wants);

-- name: insert_unsettled(parent_id)
INSERT INTO genba.unsettled (parent_id, namespace) SELECT *, :namespace FROM unnest(:parent_id);

-- name: unsuccessful_jobs(id)
SELECT id FROM genba.job WHERE id = ANY(:id) AND namespace = :namespace
       AND state IN ('failed', 'timed_out', 'cancelled')
   AND (reason IS NULL OR reason NOT LIKE 'dependency %');

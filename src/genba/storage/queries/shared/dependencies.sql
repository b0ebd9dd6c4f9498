-- name: lock_settling
-- Not needed: on this engine only one transaction writes at a time.

-- name: dependents_of_parent
SELECT child_id, wants FROM genba.dependency WHERE parent_id = :parent_id AND state = 'open'
 ORDER BY child_id LIMIT 1000;

-- name: delete_unsettled(seq)
DELETE FROM genba.unsettled WHERE seq = :seq;

-- name: add_edges(child_id, parent_id, wants)
INSERT INTO genba.dependency (child_id, parent_id, wants) VALUES (:child_id, :parent_id, :wants);

-- name: insert_unsettled(parent_id)
INSERT INTO genba.unsettled (parent_id, namespace) VALUES (:parent_id, :namespace);

-- name: open_children
-- Leaves out jobs that already have a stop request.
SELECT id, state FROM genba.job WHERE parent_id = :parent_id AND namespace = :namespace
   AND (state IN ('blocked', 'scheduled', 'waiting', 'held') OR state = 'running'
        AND cancel_requested IS NULL)
 ORDER BY id LIMIT 1000;

-- name: dependents_of_failed
SELECT child_id FROM genba.dependency WHERE parent_id = :parent_id AND state = 'broken'
 ORDER BY child_id;

-- name: reopen_edges
UPDATE genba.dependency SET state = 'open' WHERE child_id = :child_id AND state = 'broken'
RETURNING parent_id;

-- name: block_again
UPDATE genba.job
   SET state = 'blocked', granted_at = NULL, finished_at = NULL, reason = NULL,
       cancel_requested = NULL, version = version % 2000000000 + 1,
       open_deps = open_deps + (SELECT count(*) FROM genba.dependency d WHERE d.child_id = :id
                                AND d.state = 'broken')
 WHERE id = :id AND state IN ('cancelled', 'held') AND reason LIKE 'dependency %'
RETURNING id;

-- name: open_parents
SELECT d.parent_id, p.state, d.wants, p.claimed_at, p.task FROM genba.dependency d LEFT
  JOIN genba.job p ON p.id = d.parent_id
 WHERE d.child_id = :id AND d.state = 'open' ORDER BY d.parent_id;

-- name: results_of_parents
SELECT d.parent_id, p.result FROM genba.dependency d JOIN genba.job p ON p.id = d.parent_id
 WHERE d.child_id = :id ORDER BY d.parent_id;

-- name: parents_after
-- Finds parents whose rows were deleted by hand. Steps from one parent to the next, however many
-- dependents each has.
WITH RECURSIVE p (id) AS (
    SELECT min(parent_id) FROM genba.dependency WHERE state = 'open' AND parent_id > :after
     UNION ALL
    SELECT (SELECT min(parent_id) FROM genba.dependency WHERE state = 'open' AND parent_id > p.id)
      FROM p WHERE p.id IS NOT NULL
)
SELECT walked.id, EXISTS (SELECT 1 FROM genba.job j WHERE j.id = walked.id)
  FROM (SELECT id FROM p LIMIT 500) AS walked WHERE walked.id IS NOT NULL;

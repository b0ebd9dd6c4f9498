-- name: tell
-- One row, whatever the number of jobs it tells of.
INSERT INTO genba.event (at, namespace, kind, job_id, node, data) VALUES (/* now */, :namespace, :kind, :job_id, :node, :data);

-- name: enqueued
-- The same, by whoever is no node.
INSERT INTO genba.event (at, namespace, kind, job_id, data) VALUES (/* now */, :namespace, :kind, :job_id, :data);

-- name: event_page
-- At least one row, so that the pass is known even when nothing is new.  Here one writer at a time commits: what has a
-- greater number was committed later, and no snapshot need be known.
SELECT pass.snapshot, pass.top, pass.pruned, e.seq, e.at, e.kind, e.job_id, e.node, e.data
  FROM (SELECT '0:0:' AS snapshot, (SELECT max(seq) FROM genba.event) AS top,
               (SELECT pruned FROM genba.namespace WHERE name = :namespace) AS pruned) AS pass
  LEFT JOIN (SELECT seq, at, kind, job_id, node, data FROM genba.event
              WHERE seq >= :start AND namespace = :namespace
                AND (:job_id IS NULL OR job_id = :job_id OR job_id IS NULL AND instr(data, :digits) > 0)
              ORDER BY seq LIMIT :limit) AS e ON 1;

-- name: tasks_of(id)
SELECT id, task FROM genba.job WHERE id = :id AND namespace = :namespace;

-- name: prune_events
-- From the oldest on, without an index of its own; the newest stays, so that numbers are never given twice.
DELETE FROM genba.event
 WHERE seq IN (SELECT seq FROM genba.event ORDER BY seq LIMIT 1000)
   AND (at < :before OR seq <= (SELECT max(seq) FROM genba.event) - CAST(:most AS bigint))
   AND seq < (SELECT max(seq) FROM genba.event)
RETURNING namespace, seq;

-- name: note_pruned
UPDATE genba.namespace SET pruned = :pruned WHERE name = :namespace AND pruned < :pruned;

-- name: shorten_history
DELETE FROM genba.attempt WHERE job_id = :job_id AND attempt <= :before;

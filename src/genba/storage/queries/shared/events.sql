-- name: insert_event
-- One row, however many jobs it is about.
INSERT INTO genba.event (at, namespace, kind, job_id, node, data)
VALUES (/* now */, :namespace, :kind, :job_id, :node, :data);

-- name: insert_client_event
-- Like insert_event, for writers that are not nodes.
INSERT INTO genba.event (at, namespace, kind, job_id, data)
VALUES (/* now */, :namespace, :kind, :job_id, :data);

-- name: event_page
-- Returns at least one row, so that the pass is known even if there are no new events. On this
-- engine one transaction commits at a time: an event with a greater number was committed later, and
-- no snapshot is needed.
SELECT pass.snapshot, pass.top, pass.pruned, e.seq, e.at, e.kind, e.job_id, e.node, e.data
  FROM (SELECT '0:0:' AS snapshot, (SELECT max(seq) FROM genba.event) AS top,
               (SELECT pruned FROM genba.namespace WHERE name = :namespace) AS pruned) AS pass
  LEFT JOIN (SELECT seq, at, kind, job_id, node, data FROM genba.event
              WHERE seq >= :start AND namespace = :namespace
                AND (:job_id IS NULL OR job_id = :job_id OR job_id IS NULL
                     AND instr(data, :digits) > 0)
              ORDER BY seq LIMIT :limit) AS e ON 1;

-- name: tasks_of_jobs(id)
SELECT id, task FROM genba.job WHERE id = :id AND namespace = :namespace;

-- name: prune_events
-- Walks from the oldest event on, without an index of its own. The newest event stays, so that no
-- number is used twice.
DELETE FROM genba.event
 WHERE seq IN (SELECT seq FROM genba.event ORDER BY seq LIMIT 1000)
   AND (at < :before OR seq <= (SELECT max(seq) FROM genba.event) - CAST(:most AS bigint))
   AND seq < (SELECT max(seq) FROM genba.event)
RETURNING namespace, seq;

-- name: set_pruned
UPDATE genba.namespace SET pruned = :pruned WHERE name = :namespace AND pruned < :pruned;

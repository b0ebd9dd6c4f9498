-- name: event_page
-- Transactions commit in another order than that of their sequence numbers: one pass returns the
-- rows that its snapshot sees and the previous pass did not. A pass of several pages names its
-- snapshot; the first page takes its own.
SELECT pass.snapshot, pass.top, pass.pruned, e.seq, e.at, e.kind, e.job_id, e.node, e.data
  FROM (SELECT CAST(pg_current_snapshot() AS text) AS snapshot,
        (SELECT max(seq) FROM genba.event) AS top,
               (SELECT pruned FROM genba.namespace WHERE name = :namespace) AS pruned) AS pass
  LEFT JOIN LATERAL (
       SELECT seq, at, kind, job_id, node, data FROM genba.event
        WHERE seq >= :start AND namespace = :namespace
          AND (CAST(:seen AS text) = ''
               OR NOT pg_visible_in_snapshot(xid,
                                             CAST(NULLIF(CAST(:seen AS text), '') AS pg_snapshot)))
          AND (CAST(:current AS text) = ''
               OR pg_visible_in_snapshot(xid,
                                         CAST(NULLIF(CAST(:current AS text), '') AS pg_snapshot)))
          AND (CAST(:job_id AS bigint) IS NULL OR job_id = :job_id OR job_id IS NULL
               AND position(CAST(:digits AS bytea) IN data) > 0)
        ORDER BY seq LIMIT :limit) AS e ON true;

-- name: tasks_of_jobs(id)
SELECT id, task FROM genba.job WHERE id = ANY(:id) AND namespace = :namespace;

-- name: open_session
-- The row may exist: the answer to the first opening may have been lost.
INSERT INTO genba.session (id, started_at, beat_at, lease_until, lease, pid, born, namespace, host,
                           machine)
VALUES (:id, /* now */, /* boot */, /* boot */ + CAST(:lease AS bigint), :lease, :pid, :born,
        :namespace, :host, :machine)
ON CONFLICT (id) DO UPDATE SET beat_at = excluded.beat_at, lease_until = excluded.lease_until;

-- name: renew_session
UPDATE genba.session SET beat_at = /* boot */, lease_until = /* boot */ + lease WHERE id = :id
RETURNING id;

-- name: sessions
SELECT id, pid, born, host, machine, beat_at, lease_until, lease, /* boot */ FROM genba.session
 WHERE namespace = :namespace ORDER BY id;

-- name: delete_session
-- Only if the session has not renewed since :beat_at; if that is null, in any case.
DELETE FROM genba.session WHERE id = :id
    AND (CAST(:beat_at AS bigint) IS NULL OR beat_at = :beat_at) RETURNING id;

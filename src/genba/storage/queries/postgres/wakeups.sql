-- name: set_hungry
-- A hint need not survive a crash of the server.
WITH quick AS (SELECT set_config('synchronous_commit', 'off', true))
UPDATE genba.node SET hungry = :hungry FROM quick WHERE id = :id AND hungry <> :hungry RETURNING id;

-- name: wake_hungry_nodes
-- Wakes hungry nodes that serve the queue, at most as many as there are jobs. The transaction that
-- clears the flag wakes the node.
WITH quick AS (SELECT set_config('synchronous_commit', 'off', true)),
     woken AS (
    UPDATE genba.node SET hungry = false
      FROM quick
     WHERE id IN (SELECT id FROM genba.node WHERE namespace = :namespace AND hungry
                  AND state = 'live' AND position(:queue IN queues) > 0
                   LIMIT :jobs FOR UPDATE SKIP LOCKED)
    RETURNING id)
SELECT pg_notify('genba_' || id, '') FROM woken;

-- name: wake_node
SELECT pg_notify('genba_' || CAST(:node AS bigint), '');

-- name: wake_clients
SELECT pg_notify('genba_' || bell, '') FROM unnest(:bells) AS bell;

-- name: notify_channel
SELECT pg_notify(:channel, '');

-- name: advisory_lock_holder
SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND classid = CAST(:high AS bigint)::oid
       AND objid = CAST(:low AS bigint)::oid AND granted;

-- name: join_node
INSERT INTO genba.node (id, started_at, beat_at, lease_until, lease, pid, slots, namespace, name,
                        state, host, boot_id, version, queues, tasks, pool)
VALUES (:id, /* now */, /* boot */, /* boot */ + CAST(:lease AS bigint), :lease, :pid, :slots,
        :namespace, :name, 'live', :host, :boot_id, :version, :queues, :tasks, :pool)
    ON CONFLICT (namespace, name) WHERE state IN ('live', 'draining') DO NOTHING
RETURNING id;

-- name: node_named
SELECT id, host, pid, boot_id FROM genba.node
 WHERE namespace = :namespace AND name = :name AND state IN ('live', 'draining');

-- name: renew_node
-- A node whose lease is over may go on if it has not been declared dead.
UPDATE genba.node SET beat_at = /* boot */, lease_until = /* boot */ + lease
 WHERE id = :id AND state IN ('live', 'draining')
RETURNING /* now */, state;

-- name: set_node_state
UPDATE genba.node SET state = :state, hungry = :hungry, ended_at = CASE
    WHEN :state IN ('ended', 'dead') THEN /* now */ END
 WHERE id = :id AND state IN ('live', 'draining')
RETURNING id;

-- name: set_node_tasks
UPDATE genba.node SET tasks = :tasks, queues = :queues
 WHERE id = :id AND state IN ('live', 'draining') RETURNING name;

-- name: set_pool
UPDATE genba.node SET slots = :slots, pool = :pool WHERE id = :id;

-- name: live_nodes
SELECT id, name, host, boot_id, pid, state, beat_at, lease_until, lease, /* boot */, queues, tasks,
       slots, hungry, started_at, version, pool
  FROM genba.node WHERE namespace = :namespace AND state IN ('live', 'draining')
 ORDER BY started_at;

-- name: ended_nodes_on_host
SELECT id FROM genba.node WHERE host = :host AND boot_id = :boot_id AND state IN ('ended', 'dead');

-- name: forget_nodes
DELETE FROM genba.node WHERE namespace = :namespace AND state IN ('ended', 'dead')
    AND ended_at < :before
   AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.node = genba.node.id);

-- name: node_names
SELECT id, name FROM genba.node WHERE namespace = :namespace;

-- name: insert_command
INSERT INTO genba.control (node, at, job_id, attempt, verb, data)
VALUES (:node, /* now */, :job_id, :attempt, :verb, :data);

-- name: commands
SELECT seq, job_id, attempt, verb, data FROM genba.control WHERE node = :node;

-- name: delete_commands(seq)
DELETE FROM genba.control WHERE seq = :seq;

-- name: due_work
-- Reads everything that a node might have to do in one query, so that an idle node writes nothing.
SELECT /* now */,
       (SELECT min(due_at) FROM genba.job WHERE namespace = :namespace AND state = 'scheduled'),
       (SELECT min(expires_at) FROM genba.job WHERE namespace = :namespace
        AND expires_at IS NOT NULL AND finished_at IS NULL AND state <> 'running'),
       EXISTS (SELECT 1 FROM genba.unsettled WHERE namespace = :namespace),
       EXISTS (SELECT 1 FROM genba.control WHERE node = :node),
       (SELECT epoch FROM genba.namespace WHERE name = :namespace),
       (SELECT min(paused_until) FROM genba.queue WHERE namespace = :namespace AND paused),
       (SELECT min(next_at) FROM genba.schedule WHERE namespace = :namespace AND next_at IS NOT NULL
        AND NOT paused),
       EXISTS (SELECT 1 FROM genba.recheck WHERE namespace = :namespace),
       (SELECT min(next_at) FROM genba.bucket WHERE namespace = :namespace AND next_at IS NOT NULL),
       (SELECT min(look_at) FROM genba.question WHERE namespace = :namespace),
       EXISTS (SELECT 1 FROM genba.job WHERE namespace = :namespace AND parked_on IS NOT NULL)
       OR EXISTS (SELECT 1 FROM genba.job WHERE namespace = :namespace AND granted_at IS NOT NULL
                  AND claim_id IS NULL AND finished_at IS NULL),
       EXISTS (SELECT 1 FROM genba.job WHERE node IS NOT NULL),
       EXISTS (SELECT 1 FROM genba.session WHERE namespace = :namespace)
           OR EXISTS (SELECT 1 FROM genba.lock WHERE namespace = :namespace)
       OR EXISTS (SELECT 1 FROM genba.waiter WHERE namespace = :namespace);

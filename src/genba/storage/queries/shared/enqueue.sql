-- name: enqueue_one
-- Inserts nothing if an operator has changed the rules since :epoch. Ignores :call; on this engine
-- the caller wakes nodes itself.
INSERT INTO genba.job (id, created_at, due_at, due_from, rank, state, expires_at, unique_until,
                       parent_id, priority,
                       open_deps, once_waiting, namespace, queue, task, key, key_hash, tags,
                       options, args)
SELECT :id, /* now */,
        CASE WHEN CAST(:due_at AS bigint) > /* now */ THEN CAST(:due_at AS bigint)
            ELSE /* now */ + CAST(:delay AS bigint) END,
        CASE WHEN CAST(:due_at AS bigint) > /* now */ THEN 0 END,
        CASE WHEN CAST(:due_at AS bigint) > /* now */ THEN CAST(:due_at AS bigint)
            ELSE /* now */ + CAST(:delay AS bigint) END - CAST(:boost AS bigint),
        CASE WHEN CAST(:open_deps AS bigint) > 0 THEN 'blocked'
             WHEN CAST(:due_at AS bigint) > /* now */ OR CAST(:delay AS bigint) > 0 THEN 'scheduled'
             ELSE 'waiting' END,
        COALESCE(CAST(:expires_at AS bigint), /* now */ + CAST(:expires_in AS bigint)),
        /* now */ + CAST(:unique_for AS bigint), :parent_id, :priority,
        :open_deps, :once_waiting, :namespace, :queue, :task, :key, :key_hash, :tags, :options, CASE
            WHEN :long THEN x'' ELSE :args END
  FROM genba.namespace s WHERE s.name = :namespace AND (:epoch IS NULL OR s.epoch = :epoch)
    ON CONFLICT (namespace, key_hash) WHERE key_hash IS NOT NULL DO NOTHING
RETURNING id, state;

-- name: enqueue_simple
-- For a job with default options, as most are. The second column is the number of nodes to wake.
INSERT INTO genba.job (id, created_at, due_at, rank, state, priority, namespace, queue, task,
                       options, args)
SELECT :id, /* now */, /* now */, /* now */ - :boost, 'waiting', :priority, s.name, :queue, :task,
       :options, :args
  FROM genba.namespace s WHERE s.name = :namespace AND (:epoch IS NULL OR s.epoch = :epoch)
RETURNING id, 1;

-- name: enqueue_one_event
INSERT INTO genba.event (at, namespace, kind, job_id, node) SELECT /* now */, :namespace, :kind,
    :job_id, :node WHERE NOT :quiet;

-- name: job_with_key_hash
SELECT id, state, unique_until FROM genba.job WHERE namespace = :namespace AND key_hash = :key_hash;

-- name: clear_key_hash
UPDATE genba.job SET key_hash = NULL WHERE id = :id;

-- name: add_tags(name, job_id)
INSERT INTO genba.tag (namespace, name, job_id) VALUES (:namespace, :name, :job_id)
    ON CONFLICT DO NOTHING;

-- name: insert_long_arguments(job_id, args)
INSERT INTO genba.argument (job_id, args) VALUES (:job_id, :args);

-- name: next_ids
SELECT nextval('genba.job_id') FROM generate_series(1, :count);

-- name: enqueue_one
-- Inserts the job and its event and wakes a hungry node in one statement, so that a single enqueue
-- is one round trip and one commit.
-- Reads the clock once: each further reading would be one more plan to start (a tenth of the
-- server's work here).
-- A node that becomes hungry meanwhile is not seen; it soon looks once more by itself.
-- Inserts nothing if an operator has changed the rules since :epoch. In a SELECT, a parameter is
-- text unless it is cast.
WITH clock AS MATERIALIZED (SELECT /* now */ AS now), made AS (
    INSERT INTO genba.job (id, created_at, due_at, due_from, rank, state, expires_at, unique_until,
                           parent_id, priority,
                           open_deps, once_waiting, namespace, queue, task, key, key_hash, tags,
                           options, args)
    SELECT CAST(:id AS bigint), t.now,
            CASE WHEN CAST(:due_at AS bigint) > t.now THEN CAST(:due_at AS bigint)
                ELSE t.now + CAST(:delay AS bigint) END,
            CASE WHEN CAST(:due_at AS bigint) > t.now THEN 0 END,
            CASE WHEN CAST(:due_at AS bigint) > t.now THEN CAST(:due_at AS bigint)
                ELSE t.now + CAST(:delay AS bigint) END - CAST(:boost AS bigint),
            CASE WHEN CAST(:open_deps AS bigint) > 0 THEN 'blocked'
                 WHEN CAST(:due_at AS bigint) > t.now OR CAST(:delay AS bigint) > 0 THEN 'scheduled'
                 ELSE 'waiting' END,
            COALESCE(CAST(:expires_at AS bigint), t.now + CAST(:expires_in AS bigint)),
            t.now + CAST(:unique_for AS bigint), CAST(:parent_id AS bigint),
                CAST(:priority AS integer),
            CAST(:open_deps AS integer), CAST(:once_waiting AS boolean), :namespace, :queue, :task,
            :key, :key_hash, :tags, :options, CAST(:args AS bytea)
          FROM genba.namespace s, clock AS t
         WHERE s.name = :namespace AND (CAST(:epoch AS bigint) IS NULL
                                        OR s.epoch = CAST(:epoch AS bigint))
        ON CONFLICT (namespace, key_hash) WHERE key_hash IS NOT NULL DO NOTHING
        RETURNING id, state
), recorded AS (
    INSERT INTO genba.event (at, namespace, kind, job_id, node)
    SELECT t.now, :namespace, state, id, CAST(:node AS bigint) FROM made, clock AS t
     WHERE NOT CAST(:quiet AS boolean)
), woken AS (
    UPDATE genba.node SET hungry = false
     WHERE id IN (SELECT id FROM genba.node WHERE CAST(:call AS boolean) AND namespace = :namespace
                  AND hungry AND state = 'live'
                     AND position('"' || CAST(:queue AS text) || '"' IN queues) > 0 LIMIT 1
                         FOR UPDATE SKIP LOCKED)
    RETURNING id
)
SELECT id, state, (SELECT count(pg_notify('genba_' || woken.id, '')) FROM woken) FROM made;

-- name: enqueue_simple
-- Like enqueue_one, for a job with default options.
-- The second column is 0: no node is left to wake.
WITH made AS (
    INSERT INTO genba.job (id, created_at, due_at, rank, state, priority, namespace, queue, task,
                           options, args)
    SELECT CAST(:id AS bigint), t.now, t.now, t.now - CAST(:boost AS bigint), 'waiting',
           CAST(:priority AS integer),
           s.name, :queue, :task, :options, CAST(:args AS bytea)
      FROM genba.namespace s, (SELECT /* now */ AS now) AS t
     WHERE s.name = :namespace AND (CAST(:epoch AS bigint) IS NULL
                                    OR s.epoch = CAST(:epoch AS bigint))
    RETURNING id, created_at
), recorded AS (
    INSERT INTO genba.event (at, namespace, kind, job_id, node)
    SELECT created_at, :namespace, 'waiting', id, CAST(:node AS bigint) FROM made
), woken AS (
    UPDATE genba.node SET hungry = false
     WHERE id IN (SELECT id FROM genba.node WHERE namespace = :namespace AND hungry
                  AND state = 'live'
                     AND position('"' || CAST(:queue AS text) || '"' IN queues) > 0 LIMIT 1
                         FOR UPDATE SKIP LOCKED)
    RETURNING id
)
SELECT id, 0 * (SELECT count(pg_notify('genba_' || woken.id, '')) FROM woken) FROM made;

-- name: enqueue_simple_repeated
-- For an enqueue soon after another one: only reads whether a node is hungry. Being ready to wake
-- one takes as long as inserting the event.
WITH made AS (
    INSERT INTO genba.job (id, created_at, due_at, rank, state, priority, namespace, queue, task,
                           options, args)
    SELECT CAST(:id AS bigint), t.now, t.now, t.now - CAST(:boost AS bigint), 'waiting',
           CAST(:priority AS integer),
           s.name, :queue, :task, :options, CAST(:args AS bytea)
      FROM genba.namespace s, (SELECT /* now */ AS now) AS t
     WHERE s.name = :namespace AND (CAST(:epoch AS bigint) IS NULL
                                    OR s.epoch = CAST(:epoch AS bigint))
    RETURNING id, created_at
)
INSERT INTO genba.event (at, namespace, kind, job_id, node)
SELECT created_at, :namespace, 'waiting', id, CAST(:node AS bigint) FROM made
RETURNING 1, (SELECT count(*) FROM genba.node WHERE namespace = :namespace AND hungry
              AND state = 'live'
                      AND position('"' || CAST(:queue AS text) || '"' IN queues) > 0);

-- name: enqueue_one_event
-- enqueue_one inserts it.

-- name: add_tags(name, job_id)
INSERT INTO genba.tag (namespace, name, job_id) SELECT :namespace, * FROM unnest(:name, :job_id)
    ON CONFLICT DO NOTHING;

-- name: insert_long_arguments(job_id, args)
-- PostgreSQL stores long values outside the row by itself, and does not rewrite them on update.

-- name: insert_limits(template, n, ordered, per, burst)
INSERT INTO genba.bucket_limit (namespace, template, n, ordered, per, burst)
SELECT :namespace, e.template, e.n, e.ordered <> 0, e.per, e.burst
  FROM unnest(:template, :n, :ordered, CAST(:per AS bigint[]),
              CAST(:burst AS bigint[])) AS e (template, n, ordered, per, burst)
    ON CONFLICT DO NOTHING;

-- name: declare_limits(template, n, ordered, per, burst)
INSERT INTO genba.bucket_limit AS l (namespace, template, n, ordered, per, burst)
SELECT :namespace, e.template, e.n, e.ordered <> 0, e.per, e.burst
  FROM unnest(:template, :n, :ordered, CAST(:per AS bigint[]),
              CAST(:burst AS bigint[])) AS e (template, n, ordered, per, burst)
    ON CONFLICT (namespace, template) DO UPDATE SET n = excluded.n,
       most = greatest(l.most, COALESCE(l.override, l.n)), ordered = excluded.ordered,
       per = excluded.per, burst = excluded.burst
 WHERE l.n <> excluded.n OR l.ordered <> excluded.ordered OR l.per IS DISTINCT FROM excluded.per
    OR l.burst IS DISTINCT FROM excluded.burst
RETURNING l.template;

-- name: buckets_of_template(template)
SELECT name FROM genba.bucket WHERE namespace = :namespace AND template = ANY(:template);

-- name: refresh_buckets(name)
UPDATE genba.bucket AS b SET n = COALESCE(l.override, l.n), ordered = l.ordered, per = l.per,
    burst = l.burst
  FROM genba.bucket_limit l
 WHERE b.namespace = :namespace AND b.name = ANY(:name) AND l.namespace = b.namespace
   AND l.template = b.template;

-- name: existing_buckets(name)
SELECT name FROM genba.bucket WHERE namespace = :namespace AND name = ANY(:name);

-- name: make_buckets(name, template)
INSERT INTO genba.bucket (namespace, name, template, n, ordered, per, burst)
SELECT :namespace, e.name, l.template, COALESCE(l.override, l.n), l.ordered, l.per, l.burst
  FROM unnest(:name, :template) AS e (name, template)
  JOIN genba.bucket_limit l ON l.namespace = :namespace AND l.template = e.template
 ORDER BY e.name
    ON CONFLICT DO NOTHING;

-- name: lock_buckets
-- After waiting for a row lock, this returns the row as it is then, not as the statement's snapshot
-- had it.
SELECT name, template, n, ordered, per, burst, taken, owner, full_at, next_at
  FROM genba.bucket WHERE namespace = :namespace AND name = ANY(:names) ORDER BY name FOR UPDATE;

-- name: try_lock_buckets(name)
SELECT name, template, n, ordered, per, burst, taken, owner, full_at, next_at
  FROM genba.bucket WHERE namespace = :namespace AND name = ANY(:name)
 ORDER BY name FOR UPDATE SKIP LOCKED;

-- name: save_buckets(name, taken, owner, full_at, next_at, template, n)
-- The rows exist, and we hold their locks. The statement is an upsert so that each row is found by
-- the primary key: without statistics, a join with the batch would compare each row with each.
INSERT INTO genba.bucket AS b (namespace, name, taken, owner, full_at, next_at, template, n)
SELECT :namespace, e.* FROM unnest(:name, :taken, CAST(:owner AS bigint[]),
                                   CAST(:full_at AS bigint[]), CAST(:next_at AS bigint[]),
                                   :template, :n) AS e
    ON CONFLICT (namespace, name) DO UPDATE
       SET taken = excluded.taken, owner = excluded.owner, full_at = excluded.full_at,
           next_at = excluded.next_at;

-- name: first_parked
SELECT e.line, j.id, j.rank, j.buckets, j.state
  FROM unnest(:lines) AS e (line)
 CROSS JOIN LATERAL (SELECT id, rank, buckets, state FROM genba.job WHERE namespace = :namespace
                     AND parked_on = e.line
                      ORDER BY rank, id LIMIT :room) AS j;

-- name: park_on_limit(id, line, ordered)
-- For rows that this transaction has locked. Jobs of an ordered limit wait in the order of their
-- enqueue.
UPDATE genba.job AS j SET parked_on = e.line, granted_at = NULL, rank = CASE
    WHEN e.ordered = 1 THEN j.created_at ELSE j.rank END
  FROM unnest(:id, :line, :ordered) AS e (id, line, ordered) WHERE j.id = e.id;

-- name: grant_slots
-- A transaction that holds buckets never waits for a job's row: the holder of that row may be
-- waiting for a bucket.
UPDATE genba.job SET parked_on = NULL, granted_at = /* now */
 WHERE id = ANY(ARRAY(SELECT id FROM genba.job WHERE id = ANY(:ids) AND parked_on IS NOT NULL
                      AND state = 'waiting' FOR UPDATE SKIP LOCKED));

-- name: granted_jobs(id)
SELECT id FROM genba.job WHERE id = ANY(:id) AND granted_at IS NOT NULL AND parked_on IS NULL
       AND claim_id IS NULL;

-- name: park_on_next_limit(id, line)
UPDATE genba.job AS j SET parked_on = e.line FROM unnest(:id, :line) AS e (id, line)
 WHERE j.id = e.id
   AND j.id = ANY(ARRAY(SELECT id FROM genba.job WHERE id = ANY(:id) AND parked_on IS NOT NULL
                        AND finished_at IS NULL FOR UPDATE SKIP LOCKED))
RETURNING j.id;

-- name: unpark_jobs(id)
UPDATE genba.job SET parked_on = NULL
 WHERE id = ANY(ARRAY(SELECT id FROM genba.job WHERE id = ANY(:id) AND parked_on IS NOT NULL
                      AND finished_at IS NULL FOR UPDATE SKIP LOCKED))
RETURNING id;

-- name: clear_grants(id)
UPDATE genba.job SET granted_at = NULL WHERE id = ANY(:id);

-- name: limited_jobs
SELECT id, buckets, granted_at, state FROM genba.job WHERE id = ANY(:ids) AND buckets IS NOT NULL;

-- name: insert_rechecks(name, template, n, ordered, per, burst)
INSERT INTO genba.recheck (namespace, name, template, n, ordered, per, burst)
SELECT :namespace, * FROM unnest(:name, :template, CAST(:n AS bigint[]), CAST(:ordered AS bigint[]),
                                 CAST(:per AS bigint[]), CAST(:burst AS bigint[]));

-- name: delete_rechecks(seq)
DELETE FROM genba.recheck WHERE seq = ANY(:seq);

-- name: other_parked_jobs(line, queue)
SELECT e.line, e.queue, j.id
  FROM unnest(:line, CAST(:queue AS text[])) AS e (line, queue)
 CROSS JOIN LATERAL (SELECT id FROM (SELECT id, rank, queue, state FROM genba.job
                                     WHERE namespace = :namespace AND parked_on = e.line
                                      ORDER BY rank, id LIMIT 50) AS front
                      WHERE state = 'waiting' AND (e.queue IS NULL OR queue <> e.queue)
                      ORDER BY rank, id LIMIT 1) AS j;

-- name: prune_buckets(name)
-- The caller has locked the rows before; this later statement tests the conditions again.
DELETE FROM genba.bucket
 WHERE namespace = :namespace AND name = ANY(:name) AND taken = 0 AND owner IS NULL
   AND next_at IS NULL AND (full_at IS NULL OR full_at <= /* now */)
   AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.namespace = :namespace
                   AND j.parked_on = 'limit ' || bucket.name);

-- name: lock_waiting_count
-- An advisory lock instead of the task's row, which may not exist yet.
SELECT pg_advisory_xact_lock(hashtextextended('genba max_waiting ' || CAST(:namespace AS text) ||
                                              ' ' || CAST(:task AS text), 0));

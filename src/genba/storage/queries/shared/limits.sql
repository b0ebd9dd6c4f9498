-- name: insert_limits(template, n, ordered, per, burst)
INSERT INTO genba.bucket_limit (namespace, template, n, ordered, per, burst)
VALUES (:namespace, :template, :n, :ordered, :per, :burst) ON CONFLICT DO NOTHING;

-- name: declare_limits(template, n, ordered, per, burst)
INSERT INTO genba.bucket_limit (namespace, template, n, ordered, per, burst)
VALUES (:namespace, :template, :n, :ordered, :per, :burst)
    ON CONFLICT (namespace, template) DO UPDATE SET n = excluded.n,
       most = CASE WHEN genba.bucket_limit.most > COALESCE(genba.bucket_limit.override,
           genba.bucket_limit.n) THEN genba.bucket_limit.most
               ELSE COALESCE(genba.bucket_limit.override, genba.bucket_limit.n) END,
       ordered = excluded.ordered, per = excluded.per, burst = excluded.burst
 WHERE genba.bucket_limit.n <> excluded.n OR genba.bucket_limit.ordered <> excluded.ordered
    OR genba.bucket_limit.per IS DISTINCT FROM excluded.per
    OR genba.bucket_limit.burst IS DISTINCT FROM excluded.burst
RETURNING template;

-- name: set_limit
UPDATE genba.bucket_limit SET override = :n, most = CASE WHEN most > COALESCE(override, n) THEN most
    ELSE COALESCE(override, n) END
 WHERE namespace = :namespace AND template = :template AND per IS NULL AND NOT ordered
RETURNING template;

-- name: limit_rules
SELECT template, n, override, ordered, per, burst FROM genba.bucket_limit
 WHERE namespace = :namespace ORDER BY template;

-- name: buckets_of_template(template)
-- In the order in which every transaction locks them.
SELECT name FROM genba.bucket WHERE namespace = :namespace AND template = :template;

-- name: refresh_buckets(name)
UPDATE genba.bucket SET (n, ordered, per, burst) = (SELECT COALESCE(l.override, l.n), l.ordered,
                                                    l.per, l.burst FROM genba.bucket_limit l
                          WHERE l.namespace = genba.bucket.namespace
                            AND l.template = genba.bucket.template)
 WHERE namespace = :namespace AND name = :name;

-- name: existing_buckets(name)
SELECT name FROM genba.bucket WHERE namespace = :namespace AND name = :name;

-- name: make_buckets(name, template)
INSERT INTO genba.bucket (namespace, name, template, n, ordered, per, burst)
SELECT :namespace, :name, l.template, COALESCE(l.override, l.n), l.ordered, l.per, l.burst
  FROM genba.bucket_limit l WHERE l.namespace = :namespace AND l.template = :template
    ON CONFLICT DO NOTHING;

-- name: try_lock_buckets(name)
SELECT name, template, n, ordered, per, burst, taken, owner, full_at, next_at
  FROM genba.bucket WHERE namespace = :namespace AND name = :name;

-- name: save_buckets(name, taken, owner, full_at, next_at, template, n)
UPDATE genba.bucket SET taken = :taken, owner = :owner, full_at = :full_at, next_at = :next_at
 WHERE namespace = :namespace AND name = :name;

-- name: park_on_limit(id, line, ordered)
-- For rows that this transaction has locked. Jobs of an ordered limit wait in the order of their
-- enqueue.
UPDATE genba.job SET parked_on = :line, granted_at = NULL, rank = CASE
    WHEN :ordered = 1 THEN created_at ELSE rank END WHERE id = :id;

-- name: granted_jobs(id)
-- Tells which jobs were granted, if fewer were updated than asked for.
SELECT id FROM genba.job WHERE id = :id AND granted_at IS NOT NULL AND parked_on IS NULL
       AND claim_id IS NULL;

-- name: park_on_next_limit(id, line)
UPDATE genba.job SET parked_on = :line WHERE id = :id AND parked_on IS NOT NULL
    AND finished_at IS NULL RETURNING id;

-- name: unpark_jobs(id)
UPDATE genba.job SET parked_on = NULL WHERE id = :id AND parked_on IS NOT NULL
    AND finished_at IS NULL RETURNING id;

-- name: clear_grants(id)
UPDATE genba.job SET granted_at = NULL WHERE id = :id;

-- name: set_buckets
UPDATE genba.job SET buckets = :buckets, granted_at = CASE
    WHEN :granted = 1 THEN COALESCE(granted_at, /* now */) ELSE granted_at END WHERE id = :id;

-- name: limit_job
UPDATE genba.job SET buckets = :buckets, capped = :capped, parked_on = CASE
    WHEN state = 'waiting' THEN CAST(:line AS text) END,
       rank = CASE WHEN :ordered = 1 THEN created_at ELSE rank END
 WHERE id = :id RETURNING state;

-- name: buckets_of_job
SELECT id, buckets, granted_at, state FROM genba.job WHERE id = :id;

-- name: insert_rechecks(name, template, n, ordered, per, burst)
INSERT INTO genba.recheck (namespace, name, template, n, ordered, per, burst)
VALUES (:namespace, :name, :template, :n, :ordered, :per, :burst);

-- name: rechecks
SELECT seq, name, template, n, ordered, per, burst FROM genba.recheck WHERE namespace = :namespace
 ORDER BY seq LIMIT 500 /* lock */;

-- name: delete_rechecks(seq)
DELETE FROM genba.recheck WHERE seq = :seq;

-- name: parked_reasons_after
-- The safety net: steps from one reason for which jobs are parked to the next, and joins the
-- buckets among them that have a free slot.
WITH RECURSIVE lines (line, k) AS (
    SELECT min(parked_on), 1 FROM genba.job WHERE namespace = :namespace AND parked_on > :after
     UNION ALL
    SELECT (SELECT min(j.parked_on) FROM genba.job j WHERE j.namespace = :namespace
            AND j.parked_on > lines.line), k + 1
      FROM lines WHERE lines.line IS NOT NULL AND k < :most)
SELECT l.line, b.name, b.template
  FROM lines l LEFT JOIN genba.bucket b
    ON l.line LIKE 'limit %' AND b.namespace = :namespace AND b.name = substr(l.line, 7)
        AND b.per IS NULL
   AND CASE WHEN b.ordered THEN b.owner IS NULL ELSE b.taken < b.n END
 WHERE l.line IS NOT NULL ORDER BY l.k;

-- name: due_rate_buckets
SELECT name, template FROM genba.bucket
 WHERE namespace = :namespace AND next_at <= /* now */ LIMIT 200;

-- name: next_due_rate
SELECT min(next_at) FROM genba.bucket WHERE namespace = :namespace AND next_at IS NOT NULL;

-- name: count_unclaimed
-- Jobs that a rate limit has let through and that have not started.
SELECT count(*) FROM (SELECT 1 FROM genba.job WHERE namespace = :namespace
                      AND granted_at IS NOT NULL AND claim_id IS NULL AND finished_at IS NULL
                         AND buckets LIKE :mark LIMIT :most) AS these;

-- name: stale_grants
SELECT id, queue, buckets, parked_on FROM genba.job
 WHERE namespace = :namespace AND granted_at < /* now */ - 1000000 AND claim_id IS NULL
   AND finished_at IS NULL AND state = 'waiting'
 ORDER BY granted_at LIMIT 100;

-- name: other_parked_jobs(line, queue)
-- Finds, among the first parked jobs, one of another queue, for a slot whose job finds no node.
SELECT :line, :queue, id FROM (SELECT id, rank, queue, state FROM genba.job
                               WHERE namespace = :namespace AND parked_on = :line
                                ORDER BY rank, id LIMIT 50) AS front
 WHERE state = 'waiting' AND (:queue IS NULL OR queue <> :queue) ORDER BY rank, id LIMIT 1;

-- name: revoke_grant
UPDATE genba.job SET granted_at = NULL, parked_on = COALESCE(parked_on, CAST(:line AS text))
 WHERE id IN (SELECT id FROM genba.job WHERE id = :id AND state = 'waiting' AND claim_id IS NULL
              AND granted_at IS NOT NULL /* lock */)
RETURNING id;

-- name: parked_on_several_limits
-- Each of them needs buckets besides the one in whose line it is.
SELECT buckets FROM genba.job
 WHERE namespace = :namespace AND parked_on >= 'limit ' AND parked_on < 'limit!'
   AND buckets LIKE '%],[%' LIMIT :most;

-- name: empty_buckets
SELECT b.name FROM genba.bucket b
 WHERE b.namespace = :namespace AND b.taken = 0 AND b.owner IS NULL AND b.next_at IS NULL
   AND (b.full_at IS NULL OR b.full_at <= /* now */)
   AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.namespace = :namespace
                   AND j.parked_on = 'limit ' || b.name) LIMIT 500;

-- name: prune_buckets(name)
-- The caller has locked the rows before; this later statement tests the conditions again.
DELETE FROM genba.bucket
 WHERE namespace = :namespace AND name = :name AND taken = 0 AND owner IS NULL AND next_at IS NULL
   AND (full_at IS NULL OR full_at <= /* now */)
   AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.namespace = :namespace
                   AND j.parked_on = 'limit ' || :name);

-- name: bucket
SELECT name, template, n, ordered, per, burst, taken, owner, full_at, next_at FROM genba.bucket
 WHERE namespace = :namespace AND name = :name;

-- name: count_parked_ahead
SELECT count(*) FROM (SELECT 1 FROM genba.job WHERE namespace = :namespace AND parked_on = :line
                         AND (rank < :rank OR rank = :rank AND id < :id) LIMIT 10000) AS front;

-- name: slot_holders
-- Running jobs; unclaimed_slot_holders are those that have slots and have not started yet.
SELECT j.id, j.state, j.granted_at, j.claimed_at, n.name, j.buckets
  FROM genba.job j LEFT JOIN genba.node n ON n.id = j.node
 WHERE j.node IS NOT NULL AND j.namespace = :namespace AND j.buckets LIKE :mark
   AND j.granted_at IS NOT NULL
 ORDER BY j.claimed_at LIMIT 100;

-- name: unclaimed_slot_holders
SELECT id, state, granted_at, claimed_at, NULL, buckets FROM genba.job
 WHERE namespace = :namespace AND granted_at IS NOT NULL AND claim_id IS NULL
   AND finished_at IS NULL AND buckets LIKE :mark
 ORDER BY granted_at LIMIT 100;

-- name: count_capped
SELECT count(*) FROM (SELECT 1 FROM genba.job WHERE namespace = :namespace AND task = :task
                      AND capped IS NOT NULL
                         AND claim_id IS NULL AND finished_at IS NULL AND state <> 'held'
                             LIMIT :most) AS these;

-- name: lock_waiting_count
-- Not needed: on this engine only one transaction writes at a time.

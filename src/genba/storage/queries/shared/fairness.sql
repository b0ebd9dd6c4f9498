-- name: make_fair
-- From now on the queue orders jobs by virtual time, which begins at the current moment: jobs that
-- wait already keep the rank of their due time, and so start first.
INSERT INTO genba.queue (namespace, name, fair_by, vtime, changed_at)
VALUES (:namespace, :name, :fair_by, /* now */, /* now */)
    ON CONFLICT (namespace, name) DO UPDATE
       SET fair_by = excluded.fair_by, vtime = excluded.vtime, changed_at = excluded.changed_at
 WHERE genba.queue.fair_by IS NULL
RETURNING name;

-- name: advance_fair_keys(queue, key, turns)
-- Returns the virtual time of the key after that many turns.
INSERT INTO genba.fair (namespace, queue, key, last)
VALUES (:namespace, :queue, :key, (SELECT vtime FROM genba.queue WHERE namespace = :namespace
                                   AND name = :queue) + :turns)
    ON CONFLICT (namespace, queue, key) DO UPDATE
   SET last = :turns + max(genba.fair.last,
                           (SELECT vtime FROM genba.queue q WHERE q.namespace = :namespace
                            AND q.name = :queue))
RETURNING queue, key, last;

-- name: set_fair_ranks(id, fair_key, rank)
UPDATE genba.job SET fair_key = :fair_key, rank = CASE WHEN state = 'waiting' THEN :rank
    ELSE rank END WHERE id = :id;

-- name: unranked_jobs
SELECT id, queue, fair_key, priority, crashes FROM genba.job
 WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
   AND rank = 9223372036854775807
 ORDER BY id LIMIT 1000 /* lock */;

-- name: advance_queue_time
UPDATE genba.queue SET vtime = :vtime WHERE namespace = :namespace AND name = :queue
    AND vtime < :vtime;

-- name: prune_fair_keys
-- A key whose virtual time is behind that of its queue has nothing to remember.
DELETE FROM genba.fair
 WHERE namespace = :namespace
   AND EXISTS (SELECT 1 FROM genba.queue q WHERE q.namespace = genba.fair.namespace
               AND q.name = genba.fair.queue AND q.vtime >= genba.fair.last);

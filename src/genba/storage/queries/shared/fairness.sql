-- name: make_fair
-- From then on by virtual time, which begins now: what waits already has the place of its due time, and is before it.
INSERT INTO genba.queue (namespace, name, fair_by, vtime, changed_at) VALUES (:namespace, :name, :fair_by, /* now */, /* now */)
    ON CONFLICT (namespace, name) DO UPDATE SET fair_by = excluded.fair_by, vtime = excluded.vtime, changed_at = excluded.changed_at
 WHERE genba.queue.fair_by IS NULL
RETURNING name;

-- name: take_turns(queue, key, turns)
-- The key's clock after so many turns.
INSERT INTO genba.fair (namespace, queue, key, last)
VALUES (:namespace, :queue, :key, (SELECT vtime FROM genba.queue WHERE namespace = :namespace AND name = :queue) + :turns)
    ON CONFLICT (namespace, queue, key) DO UPDATE
   SET last = :turns + max(genba.fair.last, (SELECT vtime FROM genba.queue q WHERE q.namespace = :namespace AND q.name = :queue))
RETURNING queue, key, last;

-- name: set_fair(id, fair_key, rank)
UPDATE genba.job SET fair_key = :fair_key, rank = CASE WHEN state = 'waiting' THEN :rank ELSE rank END WHERE id = :id;

-- name: unranked
SELECT id, queue, fair_key, priority, crashes FROM genba.job
 WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL AND rank = 9223372036854775807
 ORDER BY id LIMIT 1000 /* lock */;

-- name: move_time
UPDATE genba.queue SET vtime = :vtime WHERE namespace = :namespace AND name = :queue AND vtime < :vtime;

-- name: forget_keys
-- A key whose clock is behind the queue's has nothing to remember.
DELETE FROM genba.fair
 WHERE namespace = :namespace
   AND EXISTS (SELECT 1 FROM genba.queue q WHERE q.namespace = genba.fair.namespace AND q.name = genba.fair.queue AND q.vtime >= genba.fair.last);

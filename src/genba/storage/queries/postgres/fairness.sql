-- name: advance_fair_keys(queue, key, turns)
-- In one order, so that two transactions that advance the same keys do not wait for each other.
INSERT INTO genba.fair AS f (namespace, queue, key, last)
SELECT :namespace, e.queue, e.key, q.vtime + e.turns
  FROM unnest(:queue, :key, :turns) AS e (queue, key, turns)
  JOIN LATERAL (SELECT vtime FROM genba.queue q WHERE q.namespace = :namespace
                AND q.name = e.queue) q ON true
 ORDER BY e.queue, e.key
    ON CONFLICT (namespace, queue, key) DO UPDATE
   SET last = greatest(f.last, (SELECT vtime FROM genba.queue q WHERE q.namespace = f.namespace
                                AND q.name = f.queue))
              + (excluded.last - (SELECT vtime FROM genba.queue q WHERE q.namespace = f.namespace
                                  AND q.name = f.queue))
RETURNING f.queue, f.key, f.last;

-- name: set_fair_ranks(id, fair_key, rank)
UPDATE genba.job AS j SET fair_key = e.fair_key, rank = CASE WHEN j.state = 'waiting' THEN e.rank
    ELSE j.rank END
  FROM unnest(:id, :fair_key, :rank) AS e (id, fair_key, rank) WHERE j.id = e.id;

-- name: advance_queue_time
-- SKIP LOCKED: a claim does not wait for another claim, which advances the time as well.
UPDATE genba.queue SET vtime = :vtime
 WHERE (namespace, name) IN (SELECT namespace, name FROM genba.queue
                              WHERE namespace = :namespace AND name = :queue AND vtime < :vtime
                                  FOR UPDATE SKIP LOCKED);

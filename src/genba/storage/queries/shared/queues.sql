-- name: declare_queue
INSERT INTO genba.queue (namespace, name, changed_at) VALUES (:namespace, :name, /* now */)
    ON CONFLICT DO NOTHING;

-- name: all_queues
SELECT name, paused, paused_until, fair_by, changed_at, changed_by FROM genba.queue
 WHERE namespace = :namespace ORDER BY name;

-- name: pause_queue
INSERT INTO genba.queue (namespace, name, paused, paused_until, changed_at, changed_by)
VALUES (:namespace, :name, true, :until, /* now */, :by)
    ON CONFLICT (namespace, name) DO UPDATE SET paused = true, paused_until = excluded.paused_until,
       changed_at = excluded.changed_at, changed_by = excluded.changed_by;

-- name: resume_queue
UPDATE genba.queue SET paused = false, paused_until = NULL, changed_at = /* now */, changed_by = :by
 WHERE namespace = :namespace AND name = :name AND paused RETURNING name;

-- name: queues_to_resume
SELECT name FROM genba.queue WHERE namespace = :namespace AND paused AND paused_until <= /* now */
 ORDER BY name;

-- name: next_waiting_queue
-- One step along the index, however many jobs wait in each queue.
SELECT queue FROM genba.job WHERE namespace = :namespace AND queue > :queue AND state = 'waiting'
       AND parked_on IS NULL
 ORDER BY queue LIMIT 1;

-- name: waiting_of_queues
SELECT queue, count(*) FROM genba.job WHERE namespace = :namespace AND state = 'waiting'
       AND parked_on IS NULL GROUP BY queue;

-- name: queues_with_rules
SELECT name, paused, paused_until, fair_by FROM genba.queue
 WHERE namespace = :namespace AND (paused OR fair_by IS NOT NULL);

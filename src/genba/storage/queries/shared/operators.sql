-- name: epoch
SELECT epoch FROM genba.namespace WHERE name = :namespace;

-- name: next_epoch
-- Whoever claims or enqueues shows the epoch it knows: after this commit nobody acts on older rules.
UPDATE genba.namespace SET epoch = epoch + 1 WHERE name = :namespace;

-- name: now_and_epoch
SELECT /* now */, (SELECT epoch FROM genba.namespace WHERE name = :namespace);

-- name: ruled_tasks
SELECT name, override, enabled FROM genba.task WHERE namespace = :namespace AND (NOT enabled OR override IS NOT NULL);

-- name: ruled_queues
SELECT name, paused, paused_until, fair_by FROM genba.queue WHERE namespace = :namespace AND (paused OR fair_by IS NOT NULL);

-- name: all_tasks
SELECT name, title, definition, override, enabled, changed_at, changed_by FROM genba.task WHERE namespace = :namespace ORDER BY name;

-- name: one_task
SELECT name, title, definition, override, enabled, changed_at, changed_by FROM genba.task WHERE namespace = :namespace AND name = :name;

-- name: all_queues
SELECT name, paused, paused_until, fair_by, changed_at, changed_by FROM genba.queue WHERE namespace = :namespace ORDER BY name;

-- name: add_task
INSERT INTO genba.task (namespace, name, title, definition, changed_at, changed_by)
VALUES (:namespace, :name, :title, :definition, /* now */, :by) ON CONFLICT DO NOTHING;

-- name: switch_task
UPDATE genba.task SET enabled = :enabled, changed_at = /* now */, changed_by = :by
 WHERE namespace = :namespace AND name = :name AND enabled <> :enabled RETURNING name;

-- name: override_task
UPDATE genba.task SET override = :override, changed_at = /* now */, changed_by = :by WHERE namespace = :namespace AND name = :name;

-- name: override_of
-- Two operators at once: the second one sees what the first has written.
SELECT override FROM genba.task WHERE namespace = :namespace AND name = :name;

-- name: pause_queue
INSERT INTO genba.queue (namespace, name, paused, paused_until, changed_at, changed_by)
VALUES (:namespace, :name, true, :until, /* now */, :by)
    ON CONFLICT (namespace, name) DO UPDATE SET paused = true, paused_until = excluded.paused_until,
       changed_at = excluded.changed_at, changed_by = excluded.changed_by;

-- name: resume_queue
UPDATE genba.queue SET paused = false, paused_until = NULL, changed_at = /* now */, changed_by = :by
 WHERE namespace = :namespace AND name = :name AND paused RETURNING name;

-- name: pauses_over
SELECT name FROM genba.queue WHERE namespace = :namespace AND paused AND paused_until <= /* now */ ORDER BY name;

-- name: next_queue
-- The next queue in which something waits: one step along the index, however long the queues are.
SELECT queue FROM genba.job WHERE namespace = :namespace AND queue > :queue AND state = 'waiting' AND parked_on IS NULL
 ORDER BY queue LIMIT 1;

-- name: park_task
UPDATE genba.job SET parked_on = :parked_on
 WHERE id IN (SELECT id FROM genba.job WHERE namespace = :namespace AND queue = :queue AND state = 'waiting' AND parked_on IS NULL
                 AND task = :task AND (rank, id) > (:rank, :id)
               ORDER BY rank, id LIMIT 2000 /* lock */)
RETURNING rank, id;

-- name: waiting_of_queues
SELECT queue, count(*) FROM genba.job WHERE namespace = :namespace AND state = 'waiting' AND parked_on IS NULL GROUP BY queue;

-- name: parked_reasons
SELECT parked_on, queue, count(*) FROM genba.job WHERE namespace = :namespace AND parked_on IS NOT NULL GROUP BY parked_on, queue;

-- name: enabled_tasks
SELECT name FROM genba.task WHERE namespace = :namespace AND enabled;

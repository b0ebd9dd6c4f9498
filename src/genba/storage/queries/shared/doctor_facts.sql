-- name: overdue_jobs
-- Counts at most a thousand.
SELECT count(*), min(due_at) FROM (SELECT due_at FROM genba.job WHERE namespace = :namespace
                                   AND state = 'scheduled'
   AND due_at < :before ORDER BY due_at LIMIT 1000) AS late;

-- name: oldest_of_queues
SELECT queue, count(*), min(due_at) FROM genba.job
 WHERE namespace = :namespace AND state = 'waiting' AND parked_on IS NULL GROUP BY queue
 ORDER BY queue;

-- name: held_reasons
SELECT reason, count(*) FROM genba.job
 WHERE namespace = :namespace AND (state < 'running' OR state = 'timed_out') AND state = 'held'
 GROUP BY reason ORDER BY 2 DESC, 1 LIMIT 10;

-- name: late_schedules
SELECT name, next_at FROM genba.schedule
 WHERE namespace = :namespace AND next_at IS NOT NULL AND NOT paused AND next_at < :before
 ORDER BY next_at LIMIT 10;

-- name: stopped_schedules
-- Paused by an operator, or after too many failures.
SELECT name, reason FROM genba.schedule WHERE namespace = :namespace AND paused AND NOT deleted
 ORDER BY name LIMIT 10;

-- name: jobs_of_ended_nodes
-- Running jobs whose node has ended: another node should have taken them over long ago.
SELECT j.id, n.name FROM genba.job j JOIN genba.node n ON n.id = j.node
 WHERE j.node IS NOT NULL AND j.namespace = :namespace AND n.state IN ('dead', 'ended')
   AND n.ended_at < :before LIMIT 10;

-- name: schedules
SELECT id, name, task, definition, args, owner, next_at, paused, reason, runs, failures, version,
       seen_at, deleted
  FROM genba.schedule WHERE namespace = :namespace ORDER BY name;

-- name: schedule_named
SELECT id, name, task, definition, args, owner, next_at, paused, reason, runs, failures, version,
       seen_at, deleted
  FROM genba.schedule WHERE namespace = :namespace AND name = :name;

-- name: schedule_by_id
SELECT id, name, task, definition, args, owner, next_at, paused, reason, runs, failures, version,
       seen_at, deleted
  FROM genba.schedule WHERE id = :id;

-- name: lock_schedule
SELECT id, name, task, definition, args, owner, next_at, paused, reason, runs, failures, version,
       seen_at, deleted
  FROM genba.schedule WHERE id = :id;

-- name: due_schedules
SELECT id, name, task, definition, args, owner, next_at, paused, reason, runs, failures, version,
       seen_at, deleted
  FROM genba.schedule WHERE namespace = :namespace AND next_at IS NOT NULL AND NOT paused
      AND next_at <= /* now */
 ORDER BY next_at, id LIMIT 20 /* lock */;

-- name: add_schedule
INSERT INTO genba.schedule (namespace, name, task, definition, args, owner, seen_at)
VALUES (:namespace, :name, :task, :definition, :args, :owner, /* now */)
    ON CONFLICT (namespace, name) DO NOTHING
RETURNING id;

-- name: write_schedule
-- The caller holds the row's lock.
UPDATE genba.schedule
   SET task = :task, definition = :definition, args = :args, owner = :owner, next_at = :next_at,
       paused = :paused, reason = :reason,
       runs = :runs, failures = :failures, seen_at = :seen_at, deleted = :deleted,
       version = version % 2000000000 + 1
 WHERE id = :id;

-- name: replan_schedule
-- Only if the row has not changed since it was read.
UPDATE genba.schedule SET next_at = :next_at, version = version % 2000000000 + 1
 WHERE id = :id AND version = :version AND NOT paused AND NOT deleted;

-- name: add_tick
INSERT INTO genba.tick (schedule_id, moment, skipped, last_moment, count, at)
VALUES (:schedule_id, :moment, :skipped, :last_moment, :count, /* now */)
    ON CONFLICT DO NOTHING
RETURNING moment;

-- name: tick_at
SELECT 1 FROM genba.tick WHERE schedule_id = :schedule_id AND moment = :moment;

-- name: set_tick
UPDATE genba.tick SET job_id = :job_id, skipped = :skipped
 WHERE schedule_id = :schedule_id AND moment = :moment;

-- name: delete_tick
-- The job never began: a new run may take this moment again.
DELETE FROM genba.tick WHERE schedule_id = :schedule_id AND moment = :moment AND job_id = :job_id;

-- name: ticks
SELECT moment, job_id, skipped, last_moment, count, at FROM genba.tick
 WHERE schedule_id = :schedule_id ORDER BY moment DESC LIMIT :limit;

-- name: attach_run
UPDATE genba.job SET schedule_id = :schedule_id, moment = :moment WHERE id = :id;

-- name: detach_run
-- From now on the schedule ignores the end of this job.
UPDATE genba.job SET schedule_id = NULL WHERE id = :id RETURNING moment;

-- name: open_runs
SELECT id, state, due_at, moment FROM genba.job WHERE schedule_id = :id AND finished_at IS NULL
 ORDER BY moment, id;

-- name: lock_unstarted_runs
SELECT id FROM genba.job WHERE schedule_id = :id AND finished_at IS NULL
       AND state IN ('blocked', 'scheduled', 'waiting') ORDER BY id;

-- name: run_of
SELECT moment, claimed_at, attempt, finished_at FROM genba.job WHERE id = :id;

-- name: first_claim
SELECT min(claimed_at) FROM {history} AS h WHERE job_id = :id;

-- name: scheduled_among(id, attempt, claim)
SELECT id, retries, crashes, losses FROM genba.job
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim AND schedule_id IS NOT NULL
   AND cancel_requested IS NULL;

-- name: block_run
UPDATE genba.job SET state = 'blocked', open_deps = open_deps + 1
 WHERE id = :id AND state IN ('scheduled', 'blocked') RETURNING id;

-- name: declared_again
-- Writes at most about once in five minutes, however many nodes there are.
UPDATE genba.schedule
   SET seen_at = /* now */, version = version % 2000000000 + 1,
       paused = CASE WHEN reason = :undeclared THEN (1 = 0) ELSE paused END, reason = CASE
           WHEN reason = :undeclared THEN NULL ELSE reason END
 WHERE namespace = :namespace AND name = :name AND owner = 'code' AND NOT deleted
   AND (reason = :undeclared OR seen_at < /* now */ - 300000000 OR seen_at > /* now */)
RETURNING name;

-- name: abandoned_schedules
SELECT name FROM genba.schedule
 WHERE namespace = :namespace AND owner = 'code' AND NOT deleted AND NOT paused
   AND seen_at < /* now */ - 3600000000;

-- name: pause_abandoned_schedule
UPDATE genba.schedule SET paused = (1 = 1), reason = :undeclared, version = version % 2000000000 + 1
 WHERE namespace = :namespace AND name = :name AND owner = 'code' AND NOT deleted AND NOT paused
   AND seen_at < /* now */ - 3600000000
RETURNING id;

-- name: prune_ticks
DELETE FROM genba.tick WHERE schedule_id = :schedule_id
   AND moment IN (SELECT moment FROM genba.tick WHERE schedule_id = :schedule_id
                  AND moment < :before ORDER BY moment LIMIT 500);

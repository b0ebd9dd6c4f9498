-- name: archive_last_run
-- Moves the record of the last attempt from the job's row to the history, before the row records
-- the next one.
INSERT INTO genba.attempt (job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu,
                           peak)
SELECT id, attempt, claimed_at, ran_from, ran_until, 'returned', ran_on, ran_pid, ran_cpu, ran_peak
  FROM genba.job WHERE id = :id AND ran_until IS NOT NULL
    ON CONFLICT DO NOTHING;

-- name: clear_last_run
UPDATE genba.job SET ran_on = NULL, ran_from = NULL, ran_until = NULL, ran_pid = NULL,
    ran_cpu = NULL, ran_peak = NULL
 WHERE id = :id AND ran_until IS NOT NULL;

-- name: succeed(id, attempt, claim, result, claimed, started, ended, pid, cpu, peak, quiet, limited)
-- The fence is the only condition: a test of the state would make the planner walk the running rows
-- instead of the primary key.
UPDATE genba.job AS j
   SET state = 'succeeded', result = e.result, finished_at = /* now */, claim_id = NULL,
       node = NULL, reason = NULL, error = NULL,
       key_hash = CASE WHEN j.unique_until > /* now */ THEN j.key_hash END,
       ran_on = :node, ran_from = e.started, ran_until = e.ended, ran_pid = e.pid, ran_cpu = e.cpu,
       ran_peak = e.peak
  FROM unnest(:id, :attempt, :claim, CAST(:result AS bytea[]), CAST(:started AS bigint[]),
              CAST(:ended AS bigint[]), CAST(:pid AS bigint[]), CAST(:cpu AS bigint[]),
              CAST(:peak AS bigint[]))
           AS e (id, attempt, claim, result, started, ended, pid, cpu, peak)
 WHERE j.id = e.id AND j.attempt = e.attempt AND j.claim_id = e.claim AND j.cancel_requested IS NULL
   AND j.schedule_id IS NULL
RETURNING e.id, e.attempt;

-- name: end_attempts(id, attempt, claim, state, attempt_after, due_at, due_from, rank, retries, crashes, losses, reason, error, result, progress)
-- A job with a stop request does not run again: the request may have been made while this result
-- was on its way.
WITH e AS (
    SELECT * FROM unnest(:id, :attempt, :claim, :state, :attempt_after, CAST(:due_at AS bigint[]),
                         CAST(:due_from AS bigint[]), CAST(:rank AS bigint[]), :retries, :crashes,
                         :losses, CAST(:reason AS text[]), CAST(:error AS text[]),
                         CAST(:result AS bytea[]), CAST(:progress AS text[]))
        AS e (id, attempt, claim, state, attempt_after, due_at, due_from, rank, retries, crashes,
              losses, reason, error, result, progress)
)
UPDATE genba.job AS j
   SET state = CASE WHEN j.cancel_requested IS NOT NULL
       AND e.state IN ('scheduled', 'waiting', 'held') THEN 'cancelled' ELSE e.state END,
       attempt = e.attempt_after, due_at = COALESCE(e.due_at, j.due_at),
       due_from = COALESCE(e.due_from, j.due_from), rank = COALESCE(e.rank, j.rank),
       retries = e.retries, crashes = e.crashes, losses = e.losses,
       reason = CASE WHEN j.cancel_requested IS NULL
                       OR e.state IN ('succeeded', 'failed', 'timed_out') THEN e.reason
                     ELSE COALESCE(CASE WHEN e.state = 'cancelled' THEN e.reason END, j.reason,
                                   CASE j.cancel_requested WHEN 'kill' THEN 'killed'
                                       ELSE 'cancelled' END) END,
       error = CASE WHEN e.state <> 'succeeded' THEN COALESCE(e.error, j.error) END,
       result = e.result,
       progress = COALESCE(e.progress, j.progress), claim_id = NULL, node = NULL,
       started_mark = NULL,
       finished_at = CASE WHEN e.state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
           OR j.cancel_requested IS NOT NULL THEN /* now */ END,
       cancel_requested = NULL,
       key_hash = CASE WHEN (e.state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
                        OR j.cancel_requested IS NOT NULL)
                       AND (j.unique_until IS NULL OR j.unique_until <= /* now */) THEN NULL
                  ELSE j.key_hash END
  FROM e
 WHERE j.id = e.id AND j.attempt = e.attempt AND j.claim_id = e.claim
RETURNING j.id, e.attempt, j.claimed_at, j.state, j.schedule_id, j.buckets, j.granted_at, e.claim;

-- name: insert_attempts(job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak, error, log)
INSERT INTO genba.attempt (job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu,
    peak, error, log)
SELECT * FROM unnest(:job_id, CAST(:attempt AS integer[]), CAST(:claimed_at AS bigint[]),
                     CAST(:started_at AS bigint[]), :ended_at, :cause, CAST(:node AS bigint[]),
                     CAST(:pid AS integer[]), CAST(:cpu AS bigint[]), CAST(:peak AS bigint[]),
                     CAST(:error AS text[]), CAST(:log AS text[]))
    ON CONFLICT DO NOTHING;

-- name: succeed(id, attempt, claim, result, claimed, started, ended, pid, cpu, peak, quiet, limited)
UPDATE genba.job
   SET state = 'succeeded', result = batch.result, finished_at = /* now */, claim_id = NULL,
       node = NULL, reason = NULL, error = NULL,
       key_hash = CASE WHEN unique_until > /* now */ THEN key_hash END,
       ran_on = :node, ran_from = batch.started, ran_until = batch.ended, ran_pid = batch.pid,
       ran_cpu = batch.cpu, ran_peak = batch.peak
  FROM /* rows */ AS batch
 WHERE genba.job.id = batch.id AND attempt = batch.attempt AND claim_id = batch.claim
   AND cancel_requested IS NULL AND schedule_id IS NULL
RETURNING id, attempt;

-- name: end_attempts(id, attempt, claim, state, attempt_after, due_at, due_from, rank, retries, crashes, losses, reason, error, result, progress)
-- A job with a stop request does not run again: the request may have been made while this result
-- was on its way.
UPDATE genba.job
   SET state = CASE WHEN cancel_requested IS NOT NULL
       AND :state IN ('scheduled', 'waiting', 'held') THEN 'cancelled' ELSE :state END,
       attempt = :attempt_after, due_at = COALESCE(:due_at, due_at),
       due_from = COALESCE(:due_from, due_from), rank = COALESCE(:rank, rank),
       retries = :retries, crashes = :crashes, losses = :losses,
       reason = CASE WHEN cancel_requested IS NULL
                       OR :state IN ('succeeded', 'failed', 'timed_out') THEN :reason
                     ELSE COALESCE(CASE WHEN :state = 'cancelled' THEN :reason END, reason,
                         CASE cancel_requested WHEN 'kill' THEN 'killed' ELSE 'cancelled' END) END,
       error = CASE WHEN :state <> 'succeeded' THEN COALESCE(:error, error) END, result = :result,
       progress = COALESCE(:progress, progress), claim_id = NULL, node = NULL, started_mark = NULL,
       finished_at = CASE WHEN :state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
           OR cancel_requested IS NOT NULL THEN /* now */ END,
       cancel_requested = NULL,
       key_hash = CASE WHEN (:state IN ('succeeded', 'failed', 'timed_out', 'cancelled')
                        OR cancel_requested IS NOT NULL)
                       AND (unique_until IS NULL OR unique_until <= /* now */) THEN NULL
                  ELSE key_hash END
 WHERE id = :id AND attempt = :attempt AND claim_id = :claim
RETURNING id, :attempt, claimed_at, state, schedule_id, buckets, granted_at, :claim;

-- name: insert_attempts(job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak, error, log)
INSERT INTO genba.attempt (job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu,
    peak, error, log)
VALUES (:job_id, :attempt, :claimed_at, :started_at, :ended_at, :cause, :node, :pid, :cpu, :peak,
    :error, :log)
    ON CONFLICT DO NOTHING;

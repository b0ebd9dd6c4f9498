-- name: own_attempt
-- Shared lock: whoever is just ending this attempt is done before us, or will see what we write.
SELECT 1 FROM genba.job WHERE id = :job_id AND attempt = :attempt AND claim_id = :claim_id FOR SHARE;

-- name: own_session
SELECT 1 FROM genba.session WHERE id = :session_id FOR KEY SHARE;

-- name: one_at_a_time
-- One at a time per name, also while the name has no row; what is counted afterwards is seen by a new snapshot.
SELECT pg_advisory_xact_lock(hashtextextended('genba lock ' || CAST(:namespace AS text) || ' ' || CAST(:name AS text), 0));

-- name: take_free
-- When nobody has it and nobody waits; of one whose owner is over, nothing.
INSERT INTO genba.lock (namespace, name, place, n, token, job_id, attempt, claim_id, session_id, pid, since)
SELECT :namespace, :name, 0, :n, nextval('genba.token'), CAST(:job_id AS bigint), CAST(:attempt AS integer), CAST(:claim_id AS bigint), CAST(:session_id AS bigint), :pid, /* now */
 WHERE NOT EXISTS (SELECT 1 FROM genba.lock l WHERE l.namespace = :namespace AND l.name = :name)
   AND NOT EXISTS (SELECT 1 FROM genba.waiter w WHERE w.namespace = :namespace AND w.name = :name)
   AND (EXISTS (SELECT 1 FROM genba.job j WHERE j.id = :job_id AND j.attempt = :attempt AND j.claim_id = :claim_id)
     OR EXISTS (SELECT 1 FROM genba.session s WHERE s.id = :session_id))
RETURNING token;

-- name: next_token
SELECT nextval('genba.token');

-- name: ring_bells
SELECT pg_notify('genba_' || bell, '') FROM unnest(:bells) AS bell;

-- name: assert_held
-- Whoever would free the lock has to wait until this transaction is over.
SELECT token FROM genba.lock WHERE namespace = :namespace AND name = :name AND token = :token FOR SHARE;

-- name: names_of_jobs
SELECT name FROM genba.lock WHERE job_id = ANY(:ids) UNION SELECT name FROM genba.waiter WHERE job_id = ANY(:ids);

-- name: free_attempts(job_id, attempt)
-- Not what a transaction of the user's has asserted: it is freed by the sweep after its end.
DELETE FROM genba.lock
 WHERE (namespace, name, place) IN (SELECT l.namespace, l.name, l.place FROM genba.lock l JOIN unnest(:job_id, :attempt) AS e (job_id, attempt)
                                           ON l.job_id = e.job_id AND l.attempt = e.attempt FOR UPDATE OF l SKIP LOCKED);

-- name: leave_attempts(job_id, attempt)
DELETE FROM genba.waiter w USING unnest(:job_id, :attempt) AS e (job_id, attempt) WHERE w.job_id = e.job_id AND w.attempt = e.attempt;

-- name: free_session
-- As above.
DELETE FROM genba.lock
 WHERE (namespace, name, place) IN (SELECT namespace, name, place FROM genba.lock WHERE session_id = :id FOR UPDATE SKIP LOCKED);

-- name: free_ownerless
-- As above.
DELETE FROM genba.lock
 WHERE (namespace, name, place) IN (
    SELECT l.namespace, l.name, l.place FROM genba.lock l WHERE l.namespace = :namespace AND l.name = :name
       AND ((l.session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s WHERE s.id = l.session_id))
         OR (l.job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = l.job_id AND j.attempt = l.attempt AND j.claim_id = l.claim_id)))
       FOR UPDATE SKIP LOCKED);

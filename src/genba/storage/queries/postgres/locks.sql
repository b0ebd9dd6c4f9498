-- name: own_attempt
-- Shared lock: a transaction that is just ending this attempt has finished before us, or will see
-- what we write.
SELECT 1 FROM genba.job WHERE id = :job_id AND attempt = :attempt
       AND claim_id = :claim_id FOR SHARE;

-- name: own_session
SELECT 1 FROM genba.session WHERE id = :session_id FOR KEY SHARE;

-- name: lock_one_name
-- One transaction at a time per name, even while the name has no row; the next statement counts
-- with a new snapshot.
SELECT pg_advisory_xact_lock(hashtextextended('genba lock ' || CAST(:namespace AS text) || ' ' ||
                                              CAST(:name AS text), 0));

-- name: take_free_lock
-- Only if the lock has no holder and no waiter, and only for an owner that still exists.
INSERT INTO genba.lock (namespace, name, place, n, token, job_id, attempt, claim_id, session_id,
                        pid, since)
SELECT :namespace, :name, 0, :n, nextval('genba.token'), CAST(:job_id AS bigint),
       CAST(:attempt AS integer), CAST(:claim_id AS bigint), CAST(:session_id AS bigint), :pid,
       /* now */
 WHERE NOT EXISTS (SELECT 1 FROM genba.lock l WHERE l.namespace = :namespace AND l.name = :name)
   AND NOT EXISTS (SELECT 1 FROM genba.waiter w WHERE w.namespace = :namespace AND w.name = :name)
   AND (EXISTS (SELECT 1 FROM genba.job j WHERE j.id = :job_id AND j.attempt = :attempt
                AND j.claim_id = :claim_id)
     OR EXISTS (SELECT 1 FROM genba.session s WHERE s.id = :session_id))
RETURNING token;

-- name: next_token
SELECT nextval('genba.token');

-- name: assert_lock_held
-- A transaction that wants to free the lock has to wait until this one ends.
SELECT token FROM genba.lock WHERE namespace = :namespace AND name = :name
       AND token = :token FOR SHARE;

-- name: free_locks_of_attempts(job_id, attempt)
-- Skips locks that a user transaction has asserted: the sweep frees them after its end.
DELETE FROM genba.lock
 WHERE (namespace, name, place) IN (SELECT l.namespace, l.name, l.place FROM genba.lock l
                                    JOIN unnest(:job_id, :attempt) AS e (job_id, attempt)
                                           ON l.job_id = e.job_id AND l.attempt = e.attempt
                                               FOR UPDATE OF l SKIP LOCKED);

-- name: delete_waiters_of_attempts(job_id, attempt)
DELETE FROM genba.waiter w USING unnest(:job_id, :attempt) AS e (job_id, attempt)
 WHERE w.job_id = e.job_id AND w.attempt = e.attempt;

-- name: lock_names_of_jobs
SELECT name FROM genba.lock WHERE job_id = ANY(:ids) UNION SELECT name FROM genba.waiter
 WHERE job_id = ANY(:ids);

-- name: free_locks_of_session
-- Skips locks that a user transaction has asserted, as above.
DELETE FROM genba.lock
 WHERE (namespace, name, place) IN (SELECT namespace, name, place FROM genba.lock
                                    WHERE session_id = :id FOR UPDATE SKIP LOCKED);

-- name: free_ownerless_locks
-- Skips locks that a user transaction has asserted, as above.
DELETE FROM genba.lock
 WHERE (namespace, name, place) IN (
    SELECT l.namespace, l.name, l.place FROM genba.lock l
     WHERE l.namespace = :namespace AND l.name = :name
       AND ((l.session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s
                                                      WHERE s.id = l.session_id))
         OR (l.job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = l.job_id
                                                  AND j.attempt = l.attempt
                                                  AND j.claim_id = l.claim_id)))
       FOR UPDATE SKIP LOCKED);

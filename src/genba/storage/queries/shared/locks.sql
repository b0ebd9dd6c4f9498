-- name: own_attempt
SELECT 1 FROM genba.job WHERE id = :job_id AND attempt = :attempt AND claim_id = :claim_id;

-- name: own_session
SELECT 1 FROM genba.session WHERE id = :session_id;

-- name: lock_one_name
-- Not needed: on this engine only one transaction writes at a time.

-- name: places_of_lock
SELECT place, token, n, job_id, attempt, claim_id, pid FROM genba.lock
 WHERE namespace = :namespace AND name = :name;

-- name: other_size_of_waiters
SELECT n FROM genba.waiter WHERE namespace = :namespace AND name = :name AND n <> :n LIMIT 1;

-- name: waiter_called_at
SELECT called_at FROM genba.waiter WHERE seq = :seq;

-- name: count_waiters_ahead
-- Passes over a waiter that was called and has not come in time; it keeps its place. Counts at most
-- :n.
SELECT count(*) FROM (SELECT 1 FROM genba.waiter WHERE namespace = :namespace AND name = :name
                      AND seq < :seq
                         AND (called_at IS NULL
                              OR called_at > /* now */ - CAST(:patience AS bigint))
                                  LIMIT :n) AS front;

-- name: insert_lock
INSERT INTO genba.lock (namespace, name, place, n, token, job_id, attempt, claim_id, session_id,
                        pid, since)
VALUES (:namespace, :name, :place, :n, :token, :job_id, :attempt, :claim_id, :session_id, :pid,
        /* now */);

-- name: advance_token
-- Not needed: take_free_lock has used the sequence.

-- name: insert_waiter
INSERT INTO genba.waiter (namespace, name, n, job_id, attempt, claim_id, session_id, pid, bell,
                          since)
VALUES (:namespace, :name, :n, :job_id, :attempt, :claim_id, :session_id, :pid, :bell, /* now */)
RETURNING seq;

-- name: own_waiter
SELECT seq FROM genba.waiter
 WHERE namespace = :namespace AND name = :name AND job_id = :job_id AND attempt = :attempt
   AND claim_id = :claim_id AND pid = :pid
 ORDER BY seq LIMIT 1;

-- name: clear_call
UPDATE genba.waiter SET called_at = NULL WHERE seq = :seq AND called_at IS NOT NULL;

-- name: delete_waiter
DELETE FROM genba.waiter WHERE seq = :seq RETURNING n, called_at;

-- name: free_lock
DELETE FROM genba.lock WHERE namespace = :namespace AND name = :name AND token = :token RETURNING n;

-- name: break_lock
DELETE FROM genba.lock WHERE namespace = :namespace AND name = :name
    AND (CAST(:token AS bigint) IS NULL OR token = :token)
RETURNING token, job_id, session_id, pid;

-- name: call_next_waiters
-- Calls as many waiters as there are free places, less those that were called just before and have
-- not come yet.
UPDATE genba.waiter SET called_at = /* now */
 WHERE seq IN (SELECT seq FROM genba.waiter WHERE namespace = :namespace AND name = :name
               AND called_at IS NULL ORDER BY seq
                LIMIT (SELECT CASE WHEN places > 0 THEN places ELSE 0 END
                         FROM (SELECT max(n) - count(CASE
                                                     WHEN called_at > /* now */ -
                                                         CAST(:patience AS bigint) THEN 1 END)
                                      - (SELECT count(*) FROM genba.lock l
                                         WHERE l.namespace = :namespace
                                           AND l.name = :name) AS places
                                 FROM genba.waiter
                                WHERE namespace = :namespace AND name = :name) AS room))
RETURNING bell;

-- name: lock_is_held
SELECT 1 FROM genba.lock WHERE namespace = :namespace AND name = :name AND token = :token;

-- name: assert_lock_held
-- An update, although it changes nothing: a transaction that wants to free the lock has to wait
-- until this one ends.
UPDATE genba.lock SET since = since WHERE namespace = :namespace AND name = :name AND token = :token
RETURNING token;

-- name: free_locks_of_attempts(job_id, attempt)
DELETE FROM genba.lock WHERE job_id = :job_id AND attempt = :attempt;

-- name: delete_waiters_of_attempts(job_id, attempt)
DELETE FROM genba.waiter WHERE job_id = :job_id AND attempt = :attempt;

-- name: lock_names_of_session
SELECT name FROM genba.lock WHERE session_id = :id UNION SELECT name FROM genba.waiter
 WHERE session_id = :id;

-- name: free_locks_of_session
DELETE FROM genba.lock WHERE session_id = :id;

-- name: delete_waiters_of_session
DELETE FROM genba.waiter WHERE session_id = :id;

-- name: free_lock_of_request
DELETE FROM genba.lock WHERE namespace = :namespace AND name = :name AND session_id = :session_id
    AND claim_id = :claim_id;

-- name: delete_waiter_of_request
DELETE FROM genba.waiter WHERE namespace = :namespace AND name = :name AND session_id = :session_id
    AND claim_id = :claim_id;

-- name: ownerless_lock_names
-- Names of locks whose owner is gone: the transaction that ended the owner could not see this row,
-- or it was locked.
SELECT l.name FROM genba.lock l WHERE l.namespace = :namespace
   AND ((l.session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s
                                                  WHERE s.id = l.session_id))
     OR (l.job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = l.job_id
                                              AND j.attempt = l.attempt
                                              AND j.claim_id = l.claim_id)))
 UNION
SELECT w.name FROM genba.waiter w WHERE w.namespace = :namespace
   AND ((w.session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s
                                                  WHERE s.id = w.session_id))
     OR (w.job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = w.job_id
                                              AND j.attempt = w.attempt
                                              AND j.claim_id = w.claim_id)))
LIMIT 100;

-- name: free_ownerless_locks
DELETE FROM genba.lock WHERE namespace = :namespace AND name = :name
   AND ((session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s
                                                WHERE s.id = session_id))
     OR (job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = job_id
                                            AND j.attempt = genba.lock.attempt
                                            AND j.claim_id = genba.lock.claim_id)));

-- name: delete_ownerless_waiters
DELETE FROM genba.waiter WHERE namespace = :namespace AND name = :name
   AND ((session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s
                                                WHERE s.id = session_id))
     OR (job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = job_id
                                            AND j.attempt = genba.waiter.attempt
                                            AND j.claim_id = genba.waiter.claim_id)));

-- name: lock_holders
SELECT l.name, l.n, l.token, l.job_id, l.attempt, l.pid, l.since, n.name, COALESCE(n.host, s.host)
  FROM genba.lock l LEFT JOIN genba.job j ON j.id = l.job_id LEFT JOIN genba.node n ON n.id = j.node
  LEFT JOIN genba.session s ON s.id = l.session_id
 WHERE l.namespace = :namespace ORDER BY l.name, l.token;

-- name: lock_waiters
SELECT w.name, w.n, w.seq, w.job_id, w.attempt, w.pid, w.since, n.name, COALESCE(n.host, s.host)
  FROM genba.waiter w LEFT JOIN genba.job j ON j.id = w.job_id LEFT
  JOIN genba.node n ON n.id = j.node LEFT JOIN genba.session s ON s.id = w.session_id
 WHERE w.namespace = :namespace ORDER BY w.name, w.seq;

-- name: nodes_of_lock
-- Nodes whose jobs hold the lock or wait for it.
SELECT DISTINCT j.node FROM genba.job j
 WHERE j.node IS NOT NULL
   AND j.id IN (SELECT job_id FROM genba.lock WHERE namespace = :namespace AND name = :name
                                       UNION SELECT job_id FROM genba.waiter
                                       WHERE namespace = :namespace AND name = :name);

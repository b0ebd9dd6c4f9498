-- name: take_free_lock
-- Only if the lock has no holder and no waiter, and only for an owner that still exists.
-- advance_token moves the sequence afterwards.
INSERT INTO genba.lock (namespace, name, place, n, token, job_id, attempt, claim_id, session_id,
                        pid, since)
SELECT :namespace, :name, 0, :n, (SELECT value + 1 FROM genba.sequence WHERE name = 'token'),
       :job_id, :attempt, :claim_id, :session_id, :pid, /* now */
 WHERE NOT EXISTS (SELECT 1 FROM genba.lock l WHERE l.namespace = :namespace AND l.name = :name)
   AND NOT EXISTS (SELECT 1 FROM genba.waiter w WHERE w.namespace = :namespace AND w.name = :name)
   AND (EXISTS (SELECT 1 FROM genba.job j WHERE j.id = :job_id AND j.attempt = :attempt
                AND j.claim_id = :claim_id)
     OR EXISTS (SELECT 1 FROM genba.session s WHERE s.id = :session_id))
RETURNING token;

-- name: next_token
UPDATE genba.sequence SET value = value + 1 WHERE name = 'token' RETURNING value;

-- name: advance_token
UPDATE genba.sequence SET value = value + 1
 WHERE name = 'token' AND value < (SELECT token FROM genba.lock WHERE namespace = :namespace
                                   AND name = :name AND place = 0);

-- name: lock_names_of_jobs
SELECT name FROM genba.lock WHERE job_id IN (SELECT value FROM json_each(:ids))
 UNION SELECT name FROM genba.waiter WHERE job_id IN (SELECT value FROM json_each(:ids));

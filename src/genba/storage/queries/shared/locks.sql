-- name: own_attempt
SELECT 1 FROM genba.job WHERE id = :job_id AND attempt = :attempt AND claim_id = :claim_id;

-- name: own_session
SELECT 1 FROM genba.session WHERE id = :session_id;

-- name: one_at_a_time
-- Writers take turns here anyway.

-- name: places_taken
SELECT place, token, n, job_id, attempt, claim_id, pid FROM genba.lock WHERE namespace = :namespace AND name = :name;

-- name: another_size
SELECT n FROM genba.waiter WHERE namespace = :namespace AND name = :name AND n <> :n LIMIT 1;

-- name: in_line
SELECT called_at FROM genba.waiter WHERE seq = :seq;

-- name: ahead_in_line
-- Who was called and does not come is passed over; it keeps its place.  More than `n` need not be counted.
SELECT count(*) FROM (SELECT 1 FROM genba.waiter WHERE namespace = :namespace AND name = :name AND seq < :seq
                         AND (called_at IS NULL OR called_at > /* now */ - CAST(:patience AS bigint)) LIMIT :n) AS front;

-- name: take_place
INSERT INTO genba.lock (namespace, name, place, n, token, job_id, attempt, claim_id, session_id, pid, since)
VALUES (:namespace, :name, :place, :n, :token, :job_id, :attempt, :claim_id, :session_id, :pid, /* now */);

-- name: count_token
-- Its sequence has done it.

-- name: stand_in_line
INSERT INTO genba.waiter (namespace, name, n, job_id, attempt, claim_id, session_id, pid, bell, since)
VALUES (:namespace, :name, :n, :job_id, :attempt, :claim_id, :session_id, :pid, :bell, /* now */)
RETURNING seq;

-- name: own_place
SELECT seq FROM genba.waiter
 WHERE namespace = :namespace AND name = :name AND job_id = :job_id AND attempt = :attempt AND claim_id = :claim_id AND pid = :pid
 ORDER BY seq LIMIT 1;

-- name: uncall
UPDATE genba.waiter SET called_at = NULL WHERE seq = :seq AND called_at IS NOT NULL;

-- name: leave_line
DELETE FROM genba.waiter WHERE seq = :seq RETURNING n, called_at;

-- name: free_place
DELETE FROM genba.lock WHERE namespace = :namespace AND name = :name AND token = :token RETURNING n;

-- name: break_places
DELETE FROM genba.lock WHERE namespace = :namespace AND name = :name AND (CAST(:token AS bigint) IS NULL OR token = :token)
RETURNING token, job_id, session_id, pid;

-- name: call_next
-- As many as there are free places, less those who were called just before and have not come yet.
UPDATE genba.waiter SET called_at = /* now */
 WHERE seq IN (SELECT seq FROM genba.waiter WHERE namespace = :namespace AND name = :name AND called_at IS NULL ORDER BY seq
                LIMIT (SELECT CASE WHEN places > 0 THEN places ELSE 0 END
                         FROM (SELECT max(n) - count(CASE WHEN called_at > /* now */ - CAST(:patience AS bigint) THEN 1 END)
                                      - (SELECT count(*) FROM genba.lock l WHERE l.namespace = :namespace AND l.name = :name) AS places
                                 FROM genba.waiter WHERE namespace = :namespace AND name = :name) AS room))
RETURNING bell;

-- name: is_held
SELECT 1 FROM genba.lock WHERE namespace = :namespace AND name = :name AND token = :token;

-- name: assert_held
-- A write, although it changes nothing: whoever would free the lock has to wait until this transaction is over.
UPDATE genba.lock SET since = since WHERE namespace = :namespace AND name = :name AND token = :token RETURNING token;

-- name: free_attempts(job_id, attempt)
DELETE FROM genba.lock WHERE job_id = :job_id AND attempt = :attempt;

-- name: leave_attempts(job_id, attempt)
DELETE FROM genba.waiter WHERE job_id = :job_id AND attempt = :attempt;

-- name: names_of_session
SELECT name FROM genba.lock WHERE session_id = :id UNION SELECT name FROM genba.waiter WHERE session_id = :id;

-- name: free_session
DELETE FROM genba.lock WHERE session_id = :id;

-- name: leave_session
DELETE FROM genba.waiter WHERE session_id = :id;

-- name: free_wish
DELETE FROM genba.lock WHERE namespace = :namespace AND name = :name AND session_id = :session_id AND claim_id = :claim_id;

-- name: leave_wish
DELETE FROM genba.waiter WHERE namespace = :namespace AND name = :name AND session_id = :session_id AND claim_id = :claim_id;

-- name: ownerless
-- Whose owner is over, and whoever ended it could not see this row, or somebody had it locked.
SELECT l.name FROM genba.lock l WHERE l.namespace = :namespace
   AND ((l.session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s WHERE s.id = l.session_id))
     OR (l.job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = l.job_id AND j.attempt = l.attempt AND j.claim_id = l.claim_id)))
 UNION
SELECT w.name FROM genba.waiter w WHERE w.namespace = :namespace
   AND ((w.session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s WHERE s.id = w.session_id))
     OR (w.job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = w.job_id AND j.attempt = w.attempt AND j.claim_id = w.claim_id)))
LIMIT 100;

-- name: free_ownerless
DELETE FROM genba.lock WHERE namespace = :namespace AND name = :name
   AND ((session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s WHERE s.id = session_id))
     OR (job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = job_id AND j.attempt = genba.lock.attempt AND j.claim_id = genba.lock.claim_id)));

-- name: leave_ownerless
DELETE FROM genba.waiter WHERE namespace = :namespace AND name = :name
   AND ((session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s WHERE s.id = session_id))
     OR (job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = job_id AND j.attempt = genba.waiter.attempt AND j.claim_id = genba.waiter.claim_id)));

-- name: all_holders
SELECT l.name, l.n, l.token, l.job_id, l.attempt, l.pid, l.since, n.name, COALESCE(n.host, s.host)
  FROM genba.lock l LEFT JOIN genba.job j ON j.id = l.job_id LEFT JOIN genba.node n ON n.id = j.node LEFT JOIN genba.session s ON s.id = l.session_id
 WHERE l.namespace = :namespace ORDER BY l.name, l.token;

-- name: all_waiters
SELECT w.name, w.n, w.seq, w.job_id, w.attempt, w.pid, w.since, n.name, COALESCE(n.host, s.host)
  FROM genba.waiter w LEFT JOIN genba.job j ON j.id = w.job_id LEFT JOIN genba.node n ON n.id = j.node LEFT JOIN genba.session s ON s.id = w.session_id
 WHERE w.namespace = :namespace ORDER BY w.name, w.seq;

-- name: nodes_in_the_way
-- Those whose jobs hold the lock, or wait for it too.
SELECT DISTINCT j.node FROM genba.job j
 WHERE j.node IS NOT NULL AND j.id IN (SELECT job_id FROM genba.lock WHERE namespace = :namespace AND name = :name
                                       UNION SELECT job_id FROM genba.waiter WHERE namespace = :namespace AND name = :name);

-- name: open_session
-- It may be there: the answer to its first opening was lost.
INSERT INTO genba.session (id, started_at, beat_at, lease_until, lease, pid, born, namespace, host, machine)
VALUES (:id, /* now */, /* boot */, /* boot */ + CAST(:lease AS bigint), :lease, :pid, :born, :namespace, :host, :machine)
ON CONFLICT (id) DO UPDATE SET beat_at = excluded.beat_at, lease_until = excluded.lease_until;

-- name: renew_session
UPDATE genba.session SET beat_at = /* boot */, lease_until = /* boot */ + lease WHERE id = :id RETURNING id;

-- name: sessions
SELECT id, pid, born, host, machine, beat_at, lease_until, lease, /* boot */ FROM genba.session WHERE namespace = :namespace ORDER BY id;

-- name: end_session
-- Only if it has not been heard since; without a moment, in any case.
DELETE FROM genba.session WHERE id = :id AND (CAST(:beat_at AS bigint) IS NULL OR beat_at = :beat_at) RETURNING id;

-- name: leave_topics
DELETE FROM genba.listener WHERE session_id = :id;

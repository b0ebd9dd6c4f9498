-- name: insert_conditions(key, task, conditions)
-- A new job is a reason to check again, but at most once a second.
INSERT INTO genba.question (namespace, key, task, conditions, look_at)
VALUES (:namespace, :key, :task, :conditions, /* now */)
    ON CONFLICT (namespace, key) DO UPDATE
       SET look_at = CASE WHEN genba.question.look_at > /* now */ + 1000000 THEN /* now */ + 1000000
           ELSE genba.question.look_at END;

-- name: park_on_condition(id, line)
UPDATE genba.job SET parked_on = :line WHERE id = :id AND state = 'waiting' AND parked_on IS NULL
    AND claim_id IS NULL;

-- name: due_conditions
-- A transaction locks the condition's row before it changes the jobs that are parked on it.
SELECT key, scout FROM genba.question WHERE namespace = :namespace AND look_at <= /* now */
 ORDER BY look_at LIMIT 100 /* lock */;

-- name: lock_condition
SELECT looks, raised, scout FROM genba.question WHERE namespace = :namespace AND key = :key;

-- name: scout_is_under_way
-- The scout has not been checked yet, whatever it waits for.
SELECT 1 FROM genba.job WHERE id = :id AND (state = 'running' OR state = 'waiting'
                                            AND (parked_on IS NULL OR parked_on <> :line));

-- name: first_parked_on_condition
SELECT id FROM genba.job WHERE namespace = :namespace AND parked_on = :line AND state = 'waiting'
 ORDER BY rank, id LIMIT :most;

-- name: unpark_for_check(id)
UPDATE genba.job SET parked_on = NULL WHERE id = :id AND state = 'waiting';

-- name: set_scout
UPDATE genba.question SET scout = :scout, look_at = /* now */ + CAST(:patience AS bigint)
 WHERE namespace = :namespace AND key = :key;

-- name: save_answer
UPDATE genba.question SET scout = NULL, looks = :looks, raised = :raised, said = :said,
    said_at = /* now */, look_at = /* now */ + CAST(:pause AS bigint)
 WHERE namespace = :namespace AND key = :key RETURNING look_at;

-- name: delete_condition
DELETE FROM genba.question WHERE namespace = :namespace AND key = :key;

-- name: condition
SELECT key, task, conditions, look_at, looks, raised, scout, said, said_at FROM genba.question
 WHERE namespace = :namespace AND key = :key;

-- name: next_condition_check
SELECT min(look_at) FROM genba.question WHERE namespace = :namespace;

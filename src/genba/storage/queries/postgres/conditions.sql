-- name: insert_conditions(key, task, conditions)
INSERT INTO genba.question AS question (namespace, key, task, conditions, look_at)
SELECT :namespace, *, /* now */ FROM unnest(:key, :task, :conditions)
    ON CONFLICT (namespace, key) DO UPDATE
       SET look_at = CASE WHEN question.look_at > /* now */ + 1000000 THEN /* now */ + 1000000
           ELSE question.look_at END;

-- name: park_on_condition(id, line)
UPDATE genba.job AS j SET parked_on = e.line FROM unnest(:id, :line) AS e (id, line)
 WHERE j.id = e.id AND j.state = 'waiting' AND j.parked_on IS NULL AND j.claim_id IS NULL;

-- name: lock_condition
SELECT looks, raised, scout FROM genba.question
 WHERE namespace = :namespace AND key = :key FOR UPDATE;

-- name: unpark_for_check(id)
UPDATE genba.job SET parked_on = NULL WHERE id = ANY(:id) AND state = 'waiting';

-- name: ask_for(key, task, conditions)
-- A newcomer is worth a look, but one a second is enough for all of them.
INSERT INTO genba.question (namespace, key, task, conditions, look_at) VALUES (:namespace, :key, :task, :conditions, /* now */)
    ON CONFLICT (namespace, key) DO UPDATE
       SET look_at = CASE WHEN genba.question.look_at > /* now */ + 1000000 THEN /* now */ + 1000000 ELSE genba.question.look_at END;

-- name: park_on_question(id, line)
UPDATE genba.job SET parked_on = :line WHERE id = :id AND state = 'waiting' AND parked_on IS NULL AND claim_id IS NULL;

-- name: due_questions
-- Whoever changes what is parked on a question holds its row first.
SELECT key, scout FROM genba.question WHERE namespace = :namespace AND look_at <= /* now */ ORDER BY look_at LIMIT 100 /* lock */;

-- name: hold_question
SELECT looks, raised, scout FROM genba.question WHERE namespace = :namespace AND key = :key;

-- name: scouting
-- It has not been asked yet, whatever it waits for.
SELECT 1 FROM genba.job WHERE id = :id AND (state = 'running' OR state = 'waiting' AND (parked_on IS NULL OR parked_on <> :line));

-- name: heads_of_question
SELECT id FROM genba.job WHERE namespace = :namespace AND parked_on = :line AND state = 'waiting' ORDER BY rank, id LIMIT :most;

-- name: let_ask(id)
UPDATE genba.job SET parked_on = NULL WHERE id = :id AND state = 'waiting';

-- name: send_scout
UPDATE genba.question SET scout = :scout, look_at = /* now */ + CAST(:patience AS bigint) WHERE namespace = :namespace AND key = :key;

-- name: answer_question
UPDATE genba.question SET scout = NULL, looks = :looks, raised = :raised, said = :said, said_at = /* now */, look_at = /* now */ + CAST(:pause AS bigint)
 WHERE namespace = :namespace AND key = :key RETURNING look_at;

-- name: forget_question
DELETE FROM genba.question WHERE namespace = :namespace AND key = :key;

-- name: question
SELECT key, task, conditions, look_at, looks, raised, scout, said, said_at FROM genba.question WHERE namespace = :namespace AND key = :key;

-- name: next_look
SELECT min(look_at) FROM genba.question WHERE namespace = :namespace;

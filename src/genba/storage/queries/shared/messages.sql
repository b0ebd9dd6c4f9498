-- name: insert_message
INSERT INTO genba.message (at, job_id, namespace, topic, data)
VALUES (/* now */, :job_id, :namespace, :topic, :data);

-- name: oldest_message
SELECT seq, data FROM genba.message WHERE job_id = :job_id ORDER BY seq LIMIT 1;

-- name: message_exists
SELECT 1 FROM genba.message WHERE seq = :seq;

-- name: delete_message
DELETE FROM genba.message WHERE seq = :seq RETURNING seq;

-- name: receive_oldest
DELETE FROM genba.message WHERE seq = (SELECT min(seq) FROM genba.message WHERE job_id = :job_id)
RETURNING data;

-- name: insert_job_listener
INSERT INTO genba.listener (namespace, job_id, bell, passed) VALUES (:namespace, :job_id, :bell, 0)
RETURNING id;

-- name: insert_topic_listener
INSERT INTO genba.listener (namespace, topic, session_id, bell, passed)
VALUES (:namespace, :topic, :session_id, :bell, :passed) RETURNING id;

-- name: listeners_of_job
SELECT bell FROM genba.listener WHERE job_id = :job_id;

-- name: listeners_of_topic
SELECT bell FROM genba.listener WHERE namespace = :namespace AND topic = :topic;

-- name: last_message_of_topic
SELECT COALESCE(max(seq), 0) FROM genba.message WHERE namespace = :namespace AND topic = :topic;

-- name: listener_exists
SELECT 1 FROM genba.listener WHERE id = :id;

-- name: messages_of_topic_after
SELECT seq, data FROM genba.message WHERE namespace = :namespace AND topic = :topic
       AND seq > :passed ORDER BY seq LIMIT 100;

-- name: set_passed
UPDATE genba.listener SET passed = :passed WHERE id = :id RETURNING id;

-- name: delete_listener
DELETE FROM genba.listener WHERE id = :id;

-- name: delete_read_messages
-- Messages that every listener has read; all of them, if the topic has no listener.
DELETE FROM genba.message WHERE namespace = :namespace AND topic = :topic
   AND NOT EXISTS (SELECT 1 FROM genba.listener l WHERE l.namespace = :namespace
                   AND l.topic = :topic AND l.passed < genba.message.seq);

-- name: topics_without_listeners
SELECT DISTINCT m.topic FROM genba.message m WHERE m.namespace = :namespace AND m.topic IS NOT NULL
   AND NOT EXISTS (SELECT 1 FROM genba.listener l WHERE l.namespace = m.namespace
                   AND l.topic = m.topic);

-- name: delete_old_messages
DELETE FROM genba.message WHERE namespace = :namespace AND topic IS NOT NULL AND at < :before
RETURNING topic, seq;

-- name: delete_late_listeners
DELETE FROM genba.listener WHERE namespace = :namespace AND topic = :topic AND passed < :seq;

-- name: delete_dead_listeners
-- Listeners of jobs that do not run any more, and of sessions that are gone.
DELETE FROM genba.listener WHERE namespace = :namespace
   AND ((job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j
                                            WHERE j.id = genba.listener.job_id
                                              AND j.node IS NOT NULL))
     OR (session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s
                                                WHERE s.id = genba.listener.session_id)));

-- name: delete_listeners_of_session
DELETE FROM genba.listener WHERE session_id = :id;

-- name: state_of
SELECT state FROM genba.job WHERE id = :id AND namespace = :namespace;

-- name: send
INSERT INTO genba.message (at, job_id, namespace, topic, data) VALUES (/* now */, :job_id, :namespace, :topic, :data);

-- name: oldest_mail
SELECT seq, data FROM genba.message WHERE job_id = :job_id ORDER BY seq LIMIT 1;

-- name: is_there
SELECT 1 FROM genba.message WHERE seq = :seq;

-- name: receive_this
DELETE FROM genba.message WHERE seq = :seq RETURNING seq;

-- name: receive
DELETE FROM genba.message WHERE seq = (SELECT min(seq) FROM genba.message WHERE job_id = :job_id) RETURNING data;

-- name: listen_to_job
INSERT INTO genba.listener (namespace, job_id, bell, passed) VALUES (:namespace, :job_id, :bell, 0) RETURNING id;

-- name: bells_of_job
SELECT bell FROM genba.listener WHERE job_id = :job_id;

-- name: listen_to_topic
INSERT INTO genba.listener (namespace, topic, session_id, bell, passed) VALUES (:namespace, :topic, :session_id, :bell, :passed) RETURNING id;

-- name: last_of_topic
SELECT COALESCE(max(seq), 0) FROM genba.message WHERE namespace = :namespace AND topic = :topic;

-- name: bells_of_topic
SELECT bell FROM genba.listener WHERE namespace = :namespace AND topic = :topic;

-- name: listens
SELECT 1 FROM genba.listener WHERE id = :id;

-- name: of_topic_after
SELECT seq, data FROM genba.message WHERE namespace = :namespace AND topic = :topic AND seq > :passed ORDER BY seq LIMIT 100;

-- name: heard
UPDATE genba.listener SET passed = :passed WHERE id = :id RETURNING id;

-- name: unlisten
DELETE FROM genba.listener WHERE id = :id;

-- name: forget_heard
-- What every listener has passed; all of it, if there is none.
DELETE FROM genba.message WHERE namespace = :namespace AND topic = :topic
   AND NOT EXISTS (SELECT 1 FROM genba.listener l WHERE l.namespace = :namespace AND l.topic = :topic AND l.passed < genba.message.seq);

-- name: topics_unheard
SELECT DISTINCT m.topic FROM genba.message m WHERE m.namespace = :namespace AND m.topic IS NOT NULL
   AND NOT EXISTS (SELECT 1 FROM genba.listener l WHERE l.namespace = m.namespace AND l.topic = m.topic);

-- name: too_old_for_topic
DELETE FROM genba.message WHERE namespace = :namespace AND topic IS NOT NULL AND at < :before RETURNING topic, seq;

-- name: cut_off
DELETE FROM genba.listener WHERE namespace = :namespace AND topic = :topic AND passed < :seq;

-- name: deaf_listeners
-- Of jobs that do not run any more, and of sessions that are over.
DELETE FROM genba.listener WHERE namespace = :namespace
   AND ((job_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.job j WHERE j.id = genba.listener.job_id AND j.node IS NOT NULL))
     OR (session_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM genba.session s WHERE s.id = genba.listener.session_id)));

-- name: prune_messages(job_id)
DELETE FROM genba.message WHERE job_id = :job_id;

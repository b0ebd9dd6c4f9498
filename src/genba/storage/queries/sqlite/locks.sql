-- name: names_of_jobs
SELECT name FROM genba.lock WHERE job_id IN (SELECT value FROM json_each(:ids))
 UNION SELECT name FROM genba.waiter WHERE job_id IN (SELECT value FROM json_each(:ids));

-- name: next_token
UPDATE genba.sequence SET value = value + 1 WHERE name = 'token' RETURNING value;

-- name: ring_bells
-- Wake-ups on SQLite do not ask the database.
SELECT 1 WHERE 0;

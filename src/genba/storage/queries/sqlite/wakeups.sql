-- name: wake_hungry_nodes
-- On SQLite, wake-ups do not go through the database.
SELECT 1 WHERE 0;

-- name: wake_clients
-- On SQLite, wake-ups do not go through the database.
SELECT 1 WHERE 0;

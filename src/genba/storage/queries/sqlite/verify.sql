-- name: verify_file
-- Also that every index agrees with its table.
PRAGMA integrity_check(20);

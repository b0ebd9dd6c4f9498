-- name: now
SELECT /* now */;

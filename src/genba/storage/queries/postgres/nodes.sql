-- name: delete_commands(seq)
DELETE FROM genba.control WHERE seq = ANY(:seq);

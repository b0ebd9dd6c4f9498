-- name: retries_set_back(id)
UPDATE genba.job SET due_at = due_at - (claimed_at - /* now */), claimed_at = /* now */
 WHERE id IN (SELECT id FROM genba.job WHERE id = ANY(:id) ORDER BY id FOR UPDATE) AND state = 'scheduled' AND claimed_at > /* now */;

-- name: ranks_set_back(id)
-- Jobs of equal rank start in the order of their ids, so they keep their order.
UPDATE genba.job SET rank = rank - (due_at - /* now */), due_at = /* now */, due_from = /* now */
 WHERE id IN (SELECT id FROM genba.job WHERE id = ANY(:id) ORDER BY id FOR UPDATE SKIP LOCKED)
   AND state = 'waiting' AND due_at > /* now */;

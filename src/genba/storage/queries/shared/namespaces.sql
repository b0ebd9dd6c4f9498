-- name: declare_namespace
INSERT INTO genba.namespace (name) VALUES (:namespace) ON CONFLICT DO NOTHING;

-- name: namespace_known
SELECT 1 FROM genba.namespace WHERE name = :namespace;

-- name: epoch
SELECT epoch FROM genba.namespace WHERE name = :namespace;

-- name: next_epoch
-- Every claim and enqueue states the epoch it knows: after this commit none of them applies older
-- rules.
UPDATE genba.namespace SET epoch = epoch + 1 WHERE name = :namespace;

-- name: now_and_epoch
SELECT /* now */, (SELECT epoch FROM genba.namespace WHERE name = :namespace);

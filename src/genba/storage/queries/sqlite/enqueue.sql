-- name: next_ids
UPDATE genba.sequence SET value = value + :count WHERE name = 'job_id' RETURNING value;

-- name: enqueue_uniform(id, args)
-- For jobs that differ only in id and arguments: two values per job go from Python to SQLite
-- instead of twenty, for hundreds of jobs per statement.
INSERT INTO genba.job (id, created_at, due_at, due_from, rank, state, expires_at, unique_until,
                       parent_id, priority, open_deps, once_waiting,
                       namespace, queue, task, key, key_hash, tags, options, args)
SELECT batch.id, :created_at, :due_at, :due_from, :rank, :state, :expires_at, :unique_until,
       :parent_id, :priority, :open_deps, :once_waiting,
       :namespace, :queue, :task, :key, :key_hash, :tags, :options, batch.args
  FROM /* rows */ AS batch;

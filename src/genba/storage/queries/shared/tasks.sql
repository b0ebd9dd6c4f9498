-- name: declare_task
INSERT INTO genba.task (namespace, name, title, definition, changed_at, changed_by)
VALUES (:namespace, :name, :title, :definition, /* now */, :by)
    ON CONFLICT (namespace, name) DO UPDATE
       SET title = excluded.title, definition = excluded.definition,
       changed_at = excluded.changed_at, changed_by = excluded.changed_by
 WHERE genba.task.definition <> excluded.definition
    OR genba.task.title IS DISTINCT FROM excluded.title;

-- name: task_definition
SELECT name, definition FROM genba.task WHERE namespace = :namespace AND name = :name;

-- name: tasks
SELECT name, title, definition, override, enabled FROM genba.task WHERE namespace = :namespace
 ORDER BY name;

-- name: tasks_with_changes
SELECT name, title, definition, override, enabled, changed_at, changed_by FROM genba.task
 WHERE namespace = :namespace ORDER BY name;

-- name: task_with_changes
SELECT name, title, definition, override, enabled, changed_at, changed_by FROM genba.task
 WHERE namespace = :namespace AND name = :name;

-- name: add_task
INSERT INTO genba.task (namespace, name, title, definition, changed_at, changed_by)
VALUES (:namespace, :name, :title, :definition, /* now */, :by) ON CONFLICT DO NOTHING;

-- name: switch_task
UPDATE genba.task SET enabled = :enabled, changed_at = /* now */, changed_by = :by
 WHERE namespace = :namespace AND name = :name AND enabled <> :enabled RETURNING name;

-- name: override_task
UPDATE genba.task SET override = :override, changed_at = /* now */, changed_by = :by
 WHERE namespace = :namespace AND name = :name;

-- name: task_override
-- Of two operators at once, the second one sees what the first has written.
SELECT override FROM genba.task WHERE namespace = :namespace AND name = :name;

-- name: task_enabled
SELECT enabled FROM genba.task WHERE namespace = :namespace AND name = :name;

-- name: enabled_tasks
SELECT name FROM genba.task WHERE namespace = :namespace AND enabled;

-- name: tasks_with_rules
SELECT name, override, enabled FROM genba.task
 WHERE namespace = :namespace AND (NOT enabled OR override IS NOT NULL);

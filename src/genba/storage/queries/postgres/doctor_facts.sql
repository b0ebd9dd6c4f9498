-- What an engine reports about itself has no common form.

-- name: engine
SELECT 'PostgreSQL', current_setting('server_version');

-- name: unused_space
SELECT relname::text, pg_total_relation_size(relid),
       CAST(pg_total_relation_size(relid) * (n_dead_tup::float8 / greatest(1,
           n_live_tup + n_dead_tup)) AS bigint)
  FROM pg_stat_user_tables WHERE schemaname = 'genba';

-- name: long_transactions
SELECT pid, coalesce(application_name, ''),
       CAST(extract(epoch FROM clock_timestamp() - xact_start) AS bigint), coalesce(state, '')
  FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
   AND xact_start < clock_timestamp() - make_interval(secs => :seconds)
       ORDER BY xact_start LIMIT 10;

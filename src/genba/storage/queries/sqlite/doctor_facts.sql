-- What an engine reports about itself has no common form.

-- name: engine
SELECT 'SQLite', sqlite_version();

-- name: unused_space
SELECT 'the file', c.page_count * s.page_size, f.freelist_count * s.page_size
  FROM pragma_page_count AS c, pragma_page_size AS s, pragma_freelist_count AS f;

-- name: long_transactions
-- A SQLite file knows no sessions, so long readers cannot be seen.
SELECT 0, '', 0, '' WHERE :seconds < 0;

-- What each engine tells of itself has no common form.

-- name: engine
SELECT 'SQLite', sqlite_version();

-- name: waste
SELECT 'the file', c.page_count * s.page_size, f.freelist_count * s.page_size
  FROM pragma_page_count AS c, pragma_page_size AS s, pragma_freelist_count AS f;

-- name: long_transactions
-- Who reads for long is seen by nobody: the file knows no sessions.
SELECT 0, '', 0, '' WHERE :seconds < 0;

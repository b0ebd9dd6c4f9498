-- The whole model of genba. Times are microseconds since 1970, UTC; leases and beats count since the machine's boot.
-- No foreign keys on the hot path: they would cost a look-up for every row in and out.

CREATE TABLE genba.namespace (
    name  TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL DEFAULT 0,         -- grows with every operator's change, a claim shows the one it knows
    pruned INTEGER NOT NULL DEFAULT 0         -- the last event that is gone
) STRICT;

-- Ids are handed out inside the transaction that uses them.
CREATE TABLE genba.sequence (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
INSERT INTO genba.sequence (name, value) VALUES ('job_id', 0), ('token', 0);

CREATE TABLE genba.job (
    id               INTEGER PRIMARY KEY,
    rank             INTEGER NOT NULL,         -- smaller starts first
    due_at           INTEGER NOT NULL,
    due_from         INTEGER,                  -- when due_at was counted; NULL: with created_at; 0: somebody has named due_at
    created_at       INTEGER NOT NULL,
    claim_id         INTEGER,                  -- (id, attempt, claim_id) is the fence; NULL: nobody runs it
    node             INTEGER,
    claimed_at       INTEGER,
    started_mark     INTEGER,
    finished_at      INTEGER,
    ran_on           INTEGER,                  -- this and the next five: the record of the last attempt, if it returned. It needs no other row
    ran_from         INTEGER,
    ran_until        INTEGER,
    ran_cpu          INTEGER,
    ran_peak         INTEGER,                  -- kB
    expires_at       INTEGER,
    unique_until     INTEGER,
    granted_at       INTEGER,                  -- since when it has a slot of each of its buckets
    capped           INTEGER,                  -- 1: counts for its task's max_waiting
    parent_id        INTEGER,
    schedule_id      INTEGER,
    moment           INTEGER,
    attempt          INTEGER NOT NULL DEFAULT 0,
    priority         INTEGER NOT NULL,
    open_deps        INTEGER NOT NULL DEFAULT 0,
    version          INTEGER NOT NULL DEFAULT 0,
    retries          INTEGER NOT NULL DEFAULT 0,
    crashes          INTEGER NOT NULL DEFAULT 0,
    losses           INTEGER NOT NULL DEFAULT 0,
    ran_pid          INTEGER,
    once_waiting     INTEGER NOT NULL DEFAULT 0,
    namespace        TEXT NOT NULL,
    queue            TEXT NOT NULL,
    task             TEXT NOT NULL,
    state            TEXT NOT NULL,
    parked_on        TEXT,                    -- what keeps a waiting job out of the claim index
    cancel_requested TEXT,
    reason           TEXT,
    key              TEXT,
    key_hash         TEXT,
    buckets          TEXT,                    -- JSON: name, template and kind of each bucket it needs a slot of
    fair_key         TEXT,                    -- of a fair queue: who takes turns with others
    tags             TEXT,
    options          TEXT,                    -- JSON; only what differs from the defaults
    progress         TEXT,
    error            TEXT,
    args             BLOB NOT NULL,           -- empty: they are long, and in the table of arguments
    result           BLOB,
    saved            BLOB,
    -- What is counted with these must fit: one row that does not would keep a statement about many from being done.
    CHECK (due_at BETWEEN -1400000000000000000 AND 1400000000000000000
       AND created_at BETWEEN -1000000000000000000 AND 1000000000000000000
       AND COALESCE(due_from, 0) BETWEEN -1000000000000000000 AND 1000000000000000000
       AND priority BETWEEN -2147483648 AND 2147483647 AND attempt BETWEEN -1000000000 AND 1000000000
       AND retries BETWEEN -1000000000 AND 1000000000 AND crashes BETWEEN -1000000 AND 1000000
       AND losses BETWEEN -1000000000 AND 1000000000 AND open_deps BETWEEN -1000000000 AND 1000000000)
) STRICT;

-- An update of SQLite writes the whole row anew, and a job is updated twice: what is long is written once, beside it.
CREATE TABLE genba.argument (
    job_id INTEGER PRIMARY KEY,
    args   BLOB NOT NULL
) STRICT;

-- All are partial: an update writes only into the indexes that its new row belongs to.  It asks each of them, though: the rare
-- states are by the alphabet (blocked, cancelled, failed, held) since IN with five words cost a seventh of all that a job's end costs.
CREATE INDEX genba.job_claim    ON genba.job (namespace, queue, rank, id) WHERE state = 'waiting' AND parked_on IS NULL;
CREATE INDEX genba.job_parked   ON genba.job (namespace, parked_on, rank, id) WHERE parked_on IS NOT NULL;
CREATE INDEX genba.job_granted  ON genba.job (namespace, granted_at) WHERE granted_at IS NOT NULL AND claim_id IS NULL AND finished_at IS NULL;
CREATE INDEX genba.job_capped   ON genba.job (namespace, task) WHERE capped IS NOT NULL AND claim_id IS NULL AND finished_at IS NULL;
CREATE INDEX genba.job_due      ON genba.job (namespace, due_at) WHERE state = 'scheduled';
CREATE INDEX genba.job_counted  ON genba.job (namespace, COALESCE(due_from, created_at)) WHERE state = 'scheduled' AND (due_from IS NULL OR due_from > 0);
CREATE INDEX genba.job_running  ON genba.job (node) WHERE node IS NOT NULL;
CREATE INDEX genba.job_finished ON genba.job (namespace, finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX genba.job_rare     ON genba.job (namespace, id) WHERE (state < 'running' OR state = 'timed_out');
CREATE INDEX genba.job_aside    ON genba.job (namespace, state, queue, task) WHERE state IN ('blocked', 'held');
CREATE INDEX genba.job_done     ON genba.job (namespace, queue, task, id) WHERE state = 'succeeded';
CREATE INDEX genba.job_expires  ON genba.job (namespace, expires_at) WHERE expires_at IS NOT NULL AND finished_at IS NULL;
CREATE INDEX genba.job_parent   ON genba.job (parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX genba.job_schedule ON genba.job (schedule_id, moment) WHERE schedule_id IS NOT NULL AND finished_at IS NULL;
CREATE INDEX genba.job_made     ON genba.job (schedule_id, id) WHERE schedule_id IS NOT NULL;
CREATE INDEX genba.job_key      ON genba.job (namespace, key) WHERE key IS NOT NULL;
CREATE UNIQUE INDEX genba.job_unique ON genba.job (namespace, key_hash) WHERE key_hash IS NOT NULL;

CREATE TABLE genba.tag (
    namespace TEXT NOT NULL,
    name      TEXT NOT NULL,
    job_id    INTEGER NOT NULL,
    PRIMARY KEY (namespace, name, job_id)
) WITHOUT ROWID, STRICT;
CREATE INDEX genba.tag_job ON genba.tag (job_id);

-- Of attempts that returned the job's own row tells, until it is tried again.
CREATE TABLE genba.attempt (
    job_id     INTEGER NOT NULL,
    claimed_at INTEGER,
    started_at INTEGER,
    ended_at   INTEGER NOT NULL,
    node       INTEGER,
    cpu        INTEGER,
    peak       INTEGER,                        -- kB
    attempt    INTEGER NOT NULL,
    pid        INTEGER,
    cause      TEXT NOT NULL,
    error      TEXT,
    log        TEXT,
    PRIMARY KEY (job_id, attempt)
) WITHOUT ROWID, STRICT;

CREATE TABLE genba.event (
    seq       INTEGER PRIMARY KEY,
    at        INTEGER NOT NULL,
    job_id    INTEGER,                         -- NULL: of many jobs, listed in data, or of none
    node      INTEGER,                         -- whose doing it was, NULL: a client's
    namespace TEXT NOT NULL,
    kind      TEXT NOT NULL,
    data      BLOB
) STRICT;

CREATE TABLE genba.dependency (
    child_id  INTEGER NOT NULL,
    parent_id INTEGER NOT NULL,
    wants     TEXT NOT NULL,                  -- success, finished, failure
    state     TEXT NOT NULL DEFAULT 'open',   -- open, met, broken
    PRIMARY KEY (child_id, parent_id)
) WITHOUT ROWID, STRICT;
CREATE INDEX genba.dependency_parent ON genba.dependency (parent_id) WHERE state = 'open';
CREATE INDEX genba.dependency_all ON genba.dependency (parent_id);

-- Parents whose children must be looked at; written with what made it so, emptied by any node.
CREATE TABLE genba.unsettled (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    parent_id INTEGER NOT NULL,
    namespace TEXT NOT NULL
) STRICT;
CREATE INDEX genba.unsettled_namespace ON genba.unsettled (namespace, seq);

-- What must be answered with yes before any job that is parked on it may start; equal ones are asked once for all.
CREATE TABLE genba.question (
    namespace  TEXT NOT NULL,
    key        TEXT NOT NULL,
    task       TEXT NOT NULL,
    conditions TEXT NOT NULL,                 -- JSON: their names
    look_at    INTEGER NOT NULL,
    looks      INTEGER NOT NULL DEFAULT 0,    -- that were answered with no, in a row
    raised     INTEGER NOT NULL DEFAULT 0,    -- that raised, in a row
    scout      INTEGER,                        -- the job that is to be asked for all
    said       TEXT,                          -- why not, in words
    said_at    INTEGER,
    PRIMARY KEY (namespace, key)
) WITHOUT ROWID, STRICT;
CREATE INDEX genba.question_look ON genba.question (namespace, look_at);

-- What holds for all buckets of a template; an operator's n wins until it is removed.
CREATE TABLE genba.bucket_limit (
    namespace TEXT NOT NULL,
    template  TEXT NOT NULL,
    n         INTEGER NOT NULL,
    override  INTEGER,
    most      INTEGER NOT NULL DEFAULT 0,        -- the greatest n that held before this one
    ordered   INTEGER NOT NULL DEFAULT 0,
    per       INTEGER,                         -- n starts in so much time; NULL: n at a time
    burst     INTEGER,
    PRIMARY KEY (namespace, template)
) WITHOUT ROWID, STRICT;

-- One row per bucket that somebody uses or waits for. Its lock is the right to take, free and hand on its slots.
CREATE TABLE genba.bucket (
    namespace TEXT NOT NULL,
    name      TEXT NOT NULL,
    template  TEXT NOT NULL,
    n         INTEGER NOT NULL,
    ordered   INTEGER NOT NULL DEFAULT 0,
    per       INTEGER,
    burst     INTEGER,
    taken     INTEGER NOT NULL DEFAULT 0,
    owner     INTEGER,                         -- of an ordered one: the job whose turn it is
    full_at   INTEGER,                         -- of a rate: when as many as the burst may start again
    next_at   INTEGER,                         -- of a rate that jobs wait for: when the next may start
    PRIMARY KEY (namespace, name)
) WITHOUT ROWID, STRICT;
CREATE INDEX genba.bucket_next ON genba.bucket (namespace, next_at) WHERE next_at IS NOT NULL;

-- Buckets whose line must be looked at; written by those who could not look themselves, emptied by any node.
CREATE TABLE genba.recheck (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace TEXT NOT NULL,
    name      TEXT NOT NULL,
    template  TEXT NOT NULL,
    n         INTEGER,                         -- with the four below: what its template means, if nobody has said yet
    ordered   INTEGER,
    per       INTEGER,
    burst     INTEGER
) STRICT;
CREATE INDEX genba.recheck_namespace ON genba.recheck (namespace, seq);

-- Whoever takes or frees a lock of a name stands in line for that name first. The owner is an attempt or a session.
CREATE TABLE genba.lock (
    namespace  TEXT NOT NULL,
    name       TEXT NOT NULL,
    place      INTEGER NOT NULL DEFAULT 0,
    n          INTEGER NOT NULL,                -- places in all: 1 for a mutex
    token      INTEGER NOT NULL,                 -- grows with every grant, of whatever name
    job_id     INTEGER,
    attempt    INTEGER,
    claim_id   INTEGER,
    session_id INTEGER,
    pid        INTEGER NOT NULL,
    since      INTEGER NOT NULL,
    PRIMARY KEY (namespace, name, place)
) WITHOUT ROWID, STRICT;
CREATE INDEX genba.lock_job ON genba.lock (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX genba.lock_session ON genba.lock (session_id) WHERE session_id IS NOT NULL;

CREATE TABLE genba.waiter (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace  TEXT NOT NULL,
    name       TEXT NOT NULL,
    n          INTEGER NOT NULL,
    job_id     INTEGER,
    attempt    INTEGER,
    claim_id   INTEGER,
    session_id INTEGER,
    pid        INTEGER NOT NULL,
    bell       INTEGER NOT NULL,                 -- where it hears that it is its turn
    since      INTEGER NOT NULL,
    called_at  INTEGER                           -- since when it has been its turn
) STRICT;
CREATE INDEX genba.waiter_name ON genba.waiter (namespace, name, seq);
CREATE INDEX genba.waiter_job ON genba.waiter (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX genba.waiter_session ON genba.waiter (session_id) WHERE session_id IS NOT NULL;

CREATE TABLE genba.schedule (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace  TEXT NOT NULL,
    name       TEXT NOT NULL,
    task       TEXT NOT NULL,
    definition TEXT NOT NULL,
    args       BLOB NOT NULL,
    owner      TEXT,
    next_at    INTEGER,
    paused     INTEGER NOT NULL DEFAULT 0,
    reason     TEXT,
    runs       INTEGER NOT NULL DEFAULT 0,
    failures   INTEGER NOT NULL DEFAULT 0,
    version    INTEGER NOT NULL DEFAULT 0,
    seen_at    INTEGER,                        -- when a node last declared it
    deleted    INTEGER NOT NULL DEFAULT 0,    -- stays, so that its ticks stay unique if it comes again
    UNIQUE (namespace, name)
) STRICT;
CREATE INDEX genba.schedule_next ON genba.schedule (namespace, next_at) WHERE next_at IS NOT NULL AND NOT paused;

-- Outlives its job: a tick happens once, whatever is pruned.
CREATE TABLE genba.tick (
    schedule_id INTEGER NOT NULL,
    moment      INTEGER NOT NULL,
    job_id      INTEGER,
    skipped     TEXT,                     -- why it made no job
    last_moment INTEGER,                   -- of many that were skipped together, and how many
    count       INTEGER,
    at          INTEGER NOT NULL,
    PRIMARY KEY (schedule_id, moment)
) WITHOUT ROWID, STRICT;

CREATE TABLE genba.task (
    namespace  TEXT NOT NULL,
    name       TEXT NOT NULL,
    title      TEXT,
    definition TEXT NOT NULL,                 -- what the code says
    override   TEXT,                          -- what an operator says; wins until it is removed
    enabled    INTEGER NOT NULL DEFAULT 1,
    changed_at INTEGER NOT NULL,
    changed_by TEXT,
    PRIMARY KEY (namespace, name)
) STRICT;

CREATE TABLE genba.queue (
    namespace    TEXT NOT NULL,
    name         TEXT NOT NULL,
    paused       INTEGER NOT NULL DEFAULT 0,
    paused_until INTEGER,
    fair_by      TEXT,
    vtime        INTEGER NOT NULL DEFAULT 0,
    changed_at   INTEGER NOT NULL,
    changed_by   TEXT,
    PRIMARY KEY (namespace, name)
) STRICT;

-- The clocks of fair queues: the virtual start of the last job of each key.
CREATE TABLE genba.fair (
    namespace TEXT NOT NULL,
    queue     TEXT NOT NULL,
    key       TEXT NOT NULL,
    last      INTEGER NOT NULL,
    PRIMARY KEY (namespace, queue, key)
) WITHOUT ROWID, STRICT;

-- One row per start of a node: an incarnation. A job's lease is its node's.
CREATE TABLE genba.node (
    id          INTEGER PRIMARY KEY,
    started_at  INTEGER NOT NULL,
    beat_at     INTEGER NOT NULL,
    lease_until INTEGER NOT NULL,
    lease       INTEGER NOT NULL,
    ended_at    INTEGER,
    pid         INTEGER NOT NULL,
    slots       INTEGER NOT NULL,
    hungry      INTEGER NOT NULL DEFAULT 0,
    namespace   TEXT NOT NULL,
    name        TEXT NOT NULL,
    state       TEXT NOT NULL,                -- live, draining, ended, dead
    host        TEXT NOT NULL,
    boot_id     TEXT NOT NULL,
    version     TEXT NOT NULL,
    queues      TEXT NOT NULL,
    tasks       TEXT NOT NULL,
    pool        TEXT                          -- JSON: pool, min and max, for those who change them
) STRICT;
CREATE UNIQUE INDEX genba.node_name ON genba.node (namespace, name) WHERE state IN ('live', 'draining');

CREATE TABLE genba.control (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    node    INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    job_id  INTEGER,
    attempt INTEGER,
    verb    TEXT NOT NULL,
    data    TEXT
) STRICT;
CREATE INDEX genba.control_node ON genba.control (node, seq);

CREATE TABLE genba.message (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    at        INTEGER NOT NULL,
    job_id    INTEGER,
    namespace TEXT NOT NULL,
    topic     TEXT,
    data      BLOB NOT NULL
) STRICT;
CREATE INDEX genba.message_job ON genba.message (job_id, seq) WHERE job_id IS NOT NULL;
CREATE INDEX genba.message_topic ON genba.message (namespace, topic, seq) WHERE topic IS NOT NULL;

-- Processes that hold locks outside of jobs, wait for them, or listen to topics.
CREATE TABLE genba.session (
    id          INTEGER PRIMARY KEY,
    started_at  INTEGER NOT NULL,
    beat_at     INTEGER NOT NULL,
    lease_until INTEGER NOT NULL,
    lease       INTEGER NOT NULL,
    pid         INTEGER NOT NULL,
    born        INTEGER NOT NULL,                -- when the process began, as its machine counts
    namespace   TEXT NOT NULL,
    host        TEXT NOT NULL,
    machine     TEXT NOT NULL                 -- its boot, and the space in which its pid counts
) STRICT;
CREATE INDEX genba.session_namespace ON genba.session (namespace, id);

-- Who hears a topic, or waits for messages to a job.
CREATE TABLE genba.listener (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace  TEXT NOT NULL,
    topic      TEXT,
    job_id     INTEGER,
    session_id INTEGER,
    bell       INTEGER NOT NULL,
    passed     INTEGER NOT NULL                  -- the last message it has heard
) STRICT;
CREATE INDEX genba.listener_topic ON genba.listener (namespace, topic) WHERE topic IS NOT NULL;
CREATE INDEX genba.listener_job ON genba.listener (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX genba.listener_session ON genba.listener (session_id) WHERE session_id IS NOT NULL;

-- All tables of genba. Times are microseconds since 1970, UTC; leases and renewals count since the machine's boot.
-- No foreign keys on the hot path: they would cost a look-up for every row in and out.

CREATE TABLE genba.namespace (
    name  TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL DEFAULT 0,         -- grows with every operator's change, a claim states the one it knows
    pruned INTEGER NOT NULL DEFAULT 0         -- the last event that was pruned
) STRICT;

-- Ids are allocated inside the transaction that uses them.
CREATE TABLE genba.sequence (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
INSERT INTO genba.sequence (name, value) VALUES ('job_id', 0), ('token', 0);

CREATE TABLE genba.job (
    id               INTEGER PRIMARY KEY,
    rank             INTEGER NOT NULL,         -- smaller starts first
    due_at           INTEGER NOT NULL,
    due_from         INTEGER,                  -- the moment that due_at was counted from; NULL: created_at; 0: due_at was given
    created_at       INTEGER NOT NULL,
    claim_id         INTEGER,                  -- (id, attempt, claim_id) is the fence; NULL: not running
    node             INTEGER,
    claimed_at       INTEGER,
    started_mark     INTEGER,
    finished_at      INTEGER,
    ran_on           INTEGER,                  -- this and the next five: the record of the last attempt, if it returned, without a row of its own
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
    parked_on        TEXT,                    -- the reason that keeps a waiting job out of the claim index
    cancel_requested TEXT,
    reason           TEXT,
    key              TEXT,
    key_hash         TEXT,
    buckets          TEXT,                    -- JSON: name, template and kind of each bucket it needs a slot of
    fair_key         TEXT,                    -- in a fair queue: jobs with this key take turns with other keys
    tags             TEXT,
    options          TEXT,                    -- JSON; only what differs from the defaults
    progress         TEXT,
    error            TEXT,
    args             BLOB NOT NULL,           -- empty if they are long: then they are in the table argument
    result           BLOB,
    saved            BLOB,
    -- Values that statements compute with must be in range: one bad row would make a statement for many rows fail.
    CHECK (due_at BETWEEN -1400000000000000000 AND 1400000000000000000
       AND created_at BETWEEN -1000000000000000000 AND 1000000000000000000
       AND COALESCE(due_from, 0) BETWEEN -1000000000000000000 AND 1000000000000000000
       AND priority BETWEEN -2147483648 AND 2147483647 AND attempt BETWEEN -1000000000 AND 1000000000
       AND retries BETWEEN -1000000000 AND 1000000000 AND crashes BETWEEN -1000000 AND 1000000
       AND losses BETWEEN -1000000000 AND 1000000000 AND open_deps BETWEEN -1000000000 AND 1000000000)
) STRICT;

-- SQLite rewrites the whole row on update, and a job is updated twice: long arguments are written once, here.
CREATE TABLE genba.argument (
    job_id INTEGER PRIMARY KEY,
    args   BLOB NOT NULL
) STRICT;

-- All are partial: an update writes only into the indexes that its new row belongs to. It tests each of them, though: the rare
-- states are compared as a range (blocked, cancelled, failed, held), because IN with five words cost a seventh of a job's end.
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

-- An attempt that returned is recorded in the job's own row, until the job runs again.
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
    job_id    INTEGER,                         -- NULL: about several jobs, listed in data, or about none
    node      INTEGER,                         -- the node that wrote it, NULL: a client
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

-- Parents whose dependents must be settled; inserted with the change that caused it, deleted by any node.
CREATE TABLE genba.unsettled (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    parent_id INTEGER NOT NULL,
    namespace TEXT NOT NULL
) STRICT;
CREATE INDEX genba.unsettled_namespace ON genba.unsettled (namespace, seq);

-- Conditions that must hold before a job that is parked on them may start; equal ones are checked once for all jobs.
CREATE TABLE genba.question (
    namespace  TEXT NOT NULL,
    key        TEXT NOT NULL,
    task       TEXT NOT NULL,
    conditions TEXT NOT NULL,                 -- JSON: their names
    look_at    INTEGER NOT NULL,
    looks      INTEGER NOT NULL DEFAULT 0,    -- checks in a row that said no
    raised     INTEGER NOT NULL DEFAULT 0,    -- checks in a row that raised
    scout      INTEGER,                        -- the job that is checked for all
    said       TEXT,                          -- the reason that the check gave
    said_at    INTEGER,
    PRIMARY KEY (namespace, key)
) WITHOUT ROWID, STRICT;
CREATE INDEX genba.question_look ON genba.question (namespace, look_at);

-- The limit of all buckets of a template; an operator's n wins until it is removed.
CREATE TABLE genba.bucket_limit (
    namespace TEXT NOT NULL,
    template  TEXT NOT NULL,
    n         INTEGER NOT NULL,
    override  INTEGER,
    most      INTEGER NOT NULL DEFAULT 0,        -- the greatest n that applied before this one
    ordered   INTEGER NOT NULL DEFAULT 0,
    per       INTEGER,                         -- n starts in that time; NULL: n at a time
    burst     INTEGER,
    PRIMARY KEY (namespace, template)
) WITHOUT ROWID, STRICT;

-- One row per bucket that is used or waited for. A transaction locks it before it takes, frees or passes on slots.
CREATE TABLE genba.bucket (
    namespace TEXT NOT NULL,
    name      TEXT NOT NULL,
    template  TEXT NOT NULL,
    n         INTEGER NOT NULL,
    ordered   INTEGER NOT NULL DEFAULT 0,
    per       INTEGER,
    burst     INTEGER,
    taken     INTEGER NOT NULL DEFAULT 0,
    owner     INTEGER,                         -- of an ordered limit: the job whose turn it is
    full_at   INTEGER,                         -- of a rate: when a whole burst may start again
    next_at   INTEGER,                         -- of a rate that jobs wait for: when the next job may start
    PRIMARY KEY (namespace, name)
) WITHOUT ROWID, STRICT;
CREATE INDEX genba.bucket_next ON genba.bucket (namespace, next_at) WHERE next_at IS NOT NULL;

-- Buckets whose parked jobs must be checked; inserted by transactions that could not do it, deleted by any node.
CREATE TABLE genba.recheck (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace TEXT NOT NULL,
    name      TEXT NOT NULL,
    template  TEXT NOT NULL,
    n         INTEGER,                         -- with the four below: the rule of its template, if no task has declared it yet
    ordered   INTEGER,
    per       INTEGER,
    burst     INTEGER
) STRICT;
CREATE INDEX genba.recheck_namespace ON genba.recheck (namespace, seq);

-- A transaction that takes or frees a lock first serializes on its name. The owner is an attempt or a session.
CREATE TABLE genba.lock (
    namespace  TEXT NOT NULL,
    name       TEXT NOT NULL,
    place      INTEGER NOT NULL DEFAULT 0,
    n          INTEGER NOT NULL,                -- number of places: 1 for a mutex
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
    bell       INTEGER NOT NULL,                 -- the receiver of its wake-ups
    since      INTEGER NOT NULL,
    called_at  INTEGER                           -- since when it may take the lock
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
    deleted    INTEGER NOT NULL DEFAULT 0,    -- the row stays, so that its ticks stay unique if the schedule is declared again
    UNIQUE (namespace, name)
) STRICT;
CREATE INDEX genba.schedule_next ON genba.schedule (namespace, next_at) WHERE next_at IS NOT NULL AND NOT paused;

-- Outlives its job, so that a tick happens once even after pruning.
CREATE TABLE genba.tick (
    schedule_id INTEGER NOT NULL,
    moment      INTEGER NOT NULL,
    job_id      INTEGER,
    skipped     TEXT,                     -- why it made no job
    last_moment INTEGER,                   -- of several skipped together: the last moment, and how many
    count       INTEGER,
    at          INTEGER NOT NULL,
    PRIMARY KEY (schedule_id, moment)
) WITHOUT ROWID, STRICT;

CREATE TABLE genba.task (
    namespace  TEXT NOT NULL,
    name       TEXT NOT NULL,
    title      TEXT,
    definition TEXT NOT NULL,                 -- the definition in the code
    override   TEXT,                          -- set by an operator; wins until it is removed
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

-- The virtual times of fair queues: the virtual start of the last job of each key.
CREATE TABLE genba.fair (
    namespace TEXT NOT NULL,
    queue     TEXT NOT NULL,
    key       TEXT NOT NULL,
    last      INTEGER NOT NULL,
    PRIMARY KEY (namespace, queue, key)
) WITHOUT ROWID, STRICT;

-- One row per start of a node (an incarnation). A job's lease is that of its node.
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
    pool        TEXT                          -- JSON: pool, min and max, for operators who change them
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
    machine     TEXT NOT NULL                 -- its boot, and its pid namespace
) STRICT;
CREATE INDEX genba.session_namespace ON genba.session (namespace, id);

-- Clients that have subscribed to a topic, or wait for messages to a job.
CREATE TABLE genba.listener (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace  TEXT NOT NULL,
    topic      TEXT,
    job_id     INTEGER,
    session_id INTEGER,
    bell       INTEGER NOT NULL,
    passed     INTEGER NOT NULL                  -- the last message it has read
) STRICT;
CREATE INDEX genba.listener_topic ON genba.listener (namespace, topic) WHERE topic IS NOT NULL;
CREATE INDEX genba.listener_job ON genba.listener (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX genba.listener_session ON genba.listener (session_id) WHERE session_id IS NOT NULL;

-- All tables of genba. Times are microseconds since 1970, UTC, by the server's clock.
-- No foreign keys on the hot path: they would cost a look-up for every row in and out.
-- Names are compared byte by byte, as SQLite does: faster, and a change of the system's collation breaks no index.

CREATE TABLE genba.namespace (
    name  text COLLATE "C" PRIMARY KEY,
    epoch bigint NOT NULL DEFAULT 0,         -- grows with every operator's change; a claim states the one it knows
    pruned bigint NOT NULL DEFAULT 0         -- the last event that was pruned
);

-- Clients take blocks of ids, so that they know a job's id before they write it.
CREATE SEQUENCE genba.job_id START 1 INCREMENT BY 100;
CREATE SEQUENCE genba.token START 1;

CREATE TABLE genba.job (
    id               bigint NOT NULL,
    rank             bigint NOT NULL,         -- smaller starts first
    due_at           bigint NOT NULL,
    due_from         bigint,                  -- the moment that due_at was counted from; NULL: created_at; 0: due_at was given
    created_at       bigint NOT NULL,
    claim_id         bigint,                  -- (id, attempt, claim_id) is the fence; NULL: not running
    node             bigint,
    claimed_at       bigint,
    started_mark     bigint,
    finished_at      bigint,
    ran_on           bigint,                  -- this and the next five: the record of the last attempt, if it returned, without a row of its own
    ran_from         bigint,
    ran_until        bigint,
    ran_cpu          bigint,
    ran_peak         bigint,                  -- kB
    expires_at       bigint,
    unique_until     bigint,
    granted_at       bigint,                  -- since when it has a slot of each of its buckets
    capped           integer,                 -- 1: counts for its task's max_waiting
    parent_id        bigint,
    schedule_id      bigint,
    moment           bigint,
    attempt          integer NOT NULL DEFAULT 0,
    priority         integer NOT NULL,
    open_deps        integer NOT NULL DEFAULT 0,
    version          integer NOT NULL DEFAULT 0,
    retries          integer NOT NULL DEFAULT 0,
    crashes          integer NOT NULL DEFAULT 0,
    losses           integer NOT NULL DEFAULT 0,
    ran_pid          integer,
    once_waiting     boolean NOT NULL DEFAULT false,
    namespace        text COLLATE "C" NOT NULL,
    queue            text COLLATE "C" NOT NULL,
    task             text COLLATE "C" NOT NULL,
    state            text COLLATE "C" NOT NULL,
    parked_on        text COLLATE "C",                    -- the reason that keeps a waiting job out of the claim index
    cancel_requested text,
    reason           text,
    key              text COLLATE "C",
    key_hash         text COLLATE "C",
    buckets          text,                    -- JSON: name, template and kind of each bucket it needs a slot of
    fair_key         text COLLATE "C",                    -- in a fair queue: jobs with this key take turns with other keys
    tags             text,
    options          text,                    -- JSON; only what differs from the defaults
    progress         text,
    error            text,
    args             bytea NOT NULL,
    result           bytea,
    saved            bytea,
    CONSTRAINT job_pkey PRIMARY KEY (id) WITH (fillfactor = 50),  -- room for the new versions of its rows: a sixth less CPU of an end
    -- Values that statements compute with must be in range: one bad row would make a statement for many rows fail.
    CHECK (due_at BETWEEN -1400000000000000000 AND 1400000000000000000
       AND created_at BETWEEN -1000000000000000000 AND 1000000000000000000
       AND COALESCE(due_from, 0) BETWEEN -1000000000000000000 AND 1000000000000000000
       AND attempt BETWEEN -1000000000 AND 1000000000
       AND retries BETWEEN -1000000000 AND 1000000000 AND crashes BETWEEN -1000000 AND 1000000
       AND losses BETWEEN -1000000000 AND 1000000000 AND open_deps BETWEEN -1000000000 AND 1000000000)
) WITH (
    fillfactor = 50,                          -- a claim and an end rewrite the row: on the same page, a tenth less CPU and log
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_analyze_scale_factor = 0.1
);

-- All but the primary key are partial: an update writes only into the indexes that its new row belongs to.
CREATE INDEX job_claim    ON genba.job (namespace, queue, rank, id) WHERE state = 'waiting' AND parked_on IS NULL;
CREATE INDEX job_parked   ON genba.job (namespace, parked_on, rank, id) WHERE parked_on IS NOT NULL;
CREATE INDEX job_granted  ON genba.job (namespace, granted_at) WHERE granted_at IS NOT NULL AND claim_id IS NULL AND finished_at IS NULL;
CREATE INDEX job_capped   ON genba.job (namespace, task) WHERE capped IS NOT NULL AND claim_id IS NULL AND finished_at IS NULL;
CREATE INDEX job_due      ON genba.job (namespace, due_at) WHERE state = 'scheduled';
CREATE INDEX job_counted  ON genba.job (namespace, (COALESCE(due_from, created_at))) WHERE state = 'scheduled' AND (due_from IS NULL OR due_from > 0);
CREATE INDEX job_running  ON genba.job (node) WHERE node IS NOT NULL;
CREATE INDEX job_finished ON genba.job (namespace, finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX job_rare     ON genba.job (namespace, id) WHERE (state < 'running' OR state = 'timed_out');  -- see SQLite's
CREATE INDEX job_aside    ON genba.job (namespace, state, queue, task) WHERE state IN ('blocked', 'held');
CREATE INDEX job_done     ON genba.job (namespace, queue, task, id) WHERE state = 'succeeded';
CREATE INDEX job_expires  ON genba.job (namespace, expires_at) WHERE expires_at IS NOT NULL AND finished_at IS NULL;
CREATE INDEX job_parent   ON genba.job (parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX job_schedule ON genba.job (schedule_id, moment) WHERE schedule_id IS NOT NULL AND finished_at IS NULL;
CREATE INDEX job_made     ON genba.job (schedule_id, id) WHERE schedule_id IS NOT NULL;
CREATE INDEX job_key      ON genba.job (namespace, key) WHERE key IS NOT NULL;
CREATE UNIQUE INDEX job_unique ON genba.job (namespace, key_hash) WHERE key_hash IS NOT NULL;

CREATE TABLE genba.tag (
    namespace text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    job_id    bigint NOT NULL,
    PRIMARY KEY (namespace, name, job_id)
);
CREATE INDEX tag_job ON genba.tag (job_id);

-- An attempt that returned is recorded in the job's own row, until the job runs again.
CREATE TABLE genba.attempt (
    job_id     bigint NOT NULL,
    claimed_at bigint,
    started_at bigint,
    ended_at   bigint NOT NULL,
    node       bigint,
    cpu        bigint,
    peak       bigint,                        -- kB
    attempt    integer NOT NULL,
    pid        integer,
    cause      text NOT NULL,
    error      text,
    log        text,
    PRIMARY KEY (job_id, attempt)
);

-- xid comes before seq: a transaction has its own number before it takes a seq, which readers rely on.
CREATE TABLE genba.event (
    xid       xid8 NOT NULL DEFAULT pg_current_xact_id(),
    seq       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at        bigint NOT NULL,
    job_id    bigint,                         -- NULL: about several jobs, listed in data, or about none
    node      bigint,                         -- the node that wrote it; NULL: a client
    namespace text COLLATE "C" NOT NULL,
    kind      text COLLATE "C" NOT NULL,
    data      bytea
);

CREATE TABLE genba.dependency (
    child_id  bigint NOT NULL,
    parent_id bigint NOT NULL,
    wants     text NOT NULL,                  -- success, finished, failure
    state     text COLLATE "C" NOT NULL DEFAULT 'open',   -- open, met, broken
    PRIMARY KEY (child_id, parent_id)
);
CREATE INDEX dependency_parent ON genba.dependency (parent_id) WHERE state = 'open';
CREATE INDEX dependency_all ON genba.dependency (parent_id);

-- Parents whose dependents must be settled; inserted with the change that caused it, deleted by any node.
CREATE TABLE genba.unsettled (
    seq       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    parent_id bigint NOT NULL,
    namespace text COLLATE "C" NOT NULL
);
CREATE INDEX unsettled_namespace ON genba.unsettled (namespace, seq);

-- Conditions that must hold before a job that is parked on them may start; equal ones are checked once for all jobs.
CREATE TABLE genba.question (
    namespace  text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    task       text COLLATE "C" NOT NULL,
    conditions text NOT NULL,                 -- JSON: their names
    look_at    bigint NOT NULL,
    looks      integer NOT NULL DEFAULT 0,    -- checks in a row that said no
    raised     integer NOT NULL DEFAULT 0,    -- checks in a row that raised
    scout      bigint,                        -- the job that is checked for all
    said       text,                          -- the reason that the check gave
    said_at    bigint,
    PRIMARY KEY (namespace, key)
);
CREATE INDEX question_look ON genba.question (namespace, look_at);

-- The limit of all buckets of a template; an operator's n wins until it is removed.
CREATE TABLE genba.bucket_limit (
    namespace text COLLATE "C" NOT NULL,
    template  text COLLATE "C" NOT NULL,
    n         bigint NOT NULL,
    override  bigint,
    most      bigint NOT NULL DEFAULT 0,        -- the greatest n that applied before this one
    ordered   boolean NOT NULL DEFAULT false,
    per       bigint,                         -- n starts in that time; NULL: n at a time
    burst     bigint,
    PRIMARY KEY (namespace, template)
);

-- One row per bucket that is used or waited for. A transaction locks it before it takes, frees or passes on slots.
CREATE TABLE genba.bucket (
    namespace text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    template  text COLLATE "C" NOT NULL,
    n         bigint NOT NULL,
    ordered   boolean NOT NULL DEFAULT false,
    per       bigint,
    burst     bigint,
    taken     bigint NOT NULL DEFAULT 0,
    owner     bigint,                         -- of an ordered limit: the job whose turn it is
    full_at   bigint,                         -- of a rate: when a whole burst may start again
    next_at   bigint,                         -- of a rate that jobs wait for: when the next job may start
    PRIMARY KEY (name, namespace)             -- the name first: with the namespace first, the planner would read all of them
) WITH (fillfactor = 50);
CREATE INDEX bucket_next ON genba.bucket (namespace, next_at) WHERE next_at IS NOT NULL;

-- Buckets whose parked jobs must be checked; inserted by transactions that could not do it, deleted by any node.
CREATE TABLE genba.recheck (
    seq       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    template  text COLLATE "C" NOT NULL,
    n         bigint,                         -- with the four below: the rule of its template, if no task has declared it yet
    ordered   bigint,
    per       bigint,
    burst     bigint
);
CREATE INDEX recheck_namespace ON genba.recheck (namespace, seq);

-- A transaction that takes or frees a lock first serializes on its name. The owner is an attempt or a session.
CREATE TABLE genba.lock (
    namespace  text COLLATE "C" NOT NULL,
    name       text COLLATE "C" NOT NULL,
    place      integer NOT NULL DEFAULT 0,
    n          integer NOT NULL,                -- number of places: 1 for a mutex
    token      bigint NOT NULL,                 -- grows with every grant, of whatever name
    job_id     bigint,
    attempt    integer,
    claim_id   bigint,
    session_id bigint,
    pid        integer NOT NULL,
    since      bigint NOT NULL,
    PRIMARY KEY (namespace, name, place)
);
CREATE INDEX lock_job ON genba.lock (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX lock_session ON genba.lock (session_id) WHERE session_id IS NOT NULL;

CREATE TABLE genba.waiter (
    seq        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace  text COLLATE "C" NOT NULL,
    name       text COLLATE "C" NOT NULL,
    n          integer NOT NULL,
    job_id     bigint,
    attempt    integer,
    claim_id   bigint,
    session_id bigint,
    pid        integer NOT NULL,
    bell       bigint NOT NULL,                 -- the receiver of its wake-ups
    since      bigint NOT NULL,
    called_at  bigint                           -- since when it may take the lock
);
CREATE INDEX waiter_name ON genba.waiter (namespace, name, seq);
CREATE INDEX waiter_job ON genba.waiter (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX waiter_session ON genba.waiter (session_id) WHERE session_id IS NOT NULL;

CREATE TABLE genba.schedule (
    id         bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    namespace  text COLLATE "C" NOT NULL,
    name       text COLLATE "C" NOT NULL,
    task       text COLLATE "C" NOT NULL,
    definition text NOT NULL,
    args       bytea NOT NULL,
    owner      text,
    next_at    bigint,
    paused     boolean NOT NULL DEFAULT false,
    reason     text,
    runs       bigint NOT NULL DEFAULT 0,
    failures   integer NOT NULL DEFAULT 0,
    version    integer NOT NULL DEFAULT 0,
    seen_at    bigint,                        -- when a node last declared it
    deleted    boolean NOT NULL DEFAULT false,    -- the row stays, so that its ticks stay unique if the schedule is declared again
    UNIQUE (namespace, name)
);
CREATE INDEX schedule_next ON genba.schedule (namespace, next_at) WHERE next_at IS NOT NULL AND NOT paused;

-- Outlives its job, so that a tick happens once even after pruning.
CREATE TABLE genba.tick (
    schedule_id bigint NOT NULL,
    moment      bigint NOT NULL,
    job_id      bigint,
    skipped     text,                     -- why it made no job
    last_moment bigint,                   -- of several skipped together: the last moment, and how many
    count       bigint,
    at          bigint NOT NULL,
    PRIMARY KEY (schedule_id, moment)
);

CREATE TABLE genba.task (
    namespace  text COLLATE "C" NOT NULL,
    name       text COLLATE "C" NOT NULL,
    title      text,
    definition text NOT NULL,                 -- the definition in the code
    override   text,                          -- set by an operator; wins until it is removed
    enabled    boolean NOT NULL DEFAULT true,
    changed_at bigint NOT NULL,
    changed_by text,
    PRIMARY KEY (namespace, name)
);

CREATE TABLE genba.queue (
    namespace    text COLLATE "C" NOT NULL,
    name         text COLLATE "C" NOT NULL,
    paused       boolean NOT NULL DEFAULT false,
    paused_until bigint,
    fair_by      text,
    vtime        bigint NOT NULL DEFAULT 0,
    changed_at   bigint NOT NULL,
    changed_by   text,
    PRIMARY KEY (namespace, name)
);

-- The virtual times of fair queues: the virtual start of the last job of each key.
CREATE TABLE genba.fair (
    namespace text COLLATE "C" NOT NULL,
    queue     text COLLATE "C" NOT NULL,
    key       text COLLATE "C" NOT NULL,
    last      bigint NOT NULL,
    PRIMARY KEY (namespace, queue, key)
) WITH (fillfactor = 70);

-- One row per start of a node (an incarnation). A job's lease is that of its node.
CREATE TABLE genba.node (
    id          bigint PRIMARY KEY,
    started_at  bigint NOT NULL,
    beat_at     bigint NOT NULL,
    lease_until bigint NOT NULL,
    lease       bigint NOT NULL,
    ended_at    bigint,
    pid         integer NOT NULL,
    slots       integer NOT NULL,
    hungry      boolean NOT NULL DEFAULT false,
    namespace   text COLLATE "C" NOT NULL,
    name        text COLLATE "C" NOT NULL,
    state       text COLLATE "C" NOT NULL,                -- live, draining, ended, dead
    host        text NOT NULL,
    boot_id     text NOT NULL,
    version     text NOT NULL,
    queues      text NOT NULL,
    tasks       text NOT NULL,
    pool        text                          -- JSON: pool, min and max, for operators who change them
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX node_name ON genba.node (namespace, name) WHERE state IN ('live', 'draining');

CREATE TABLE genba.control (
    seq     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    node    bigint NOT NULL,
    at      bigint NOT NULL,
    job_id  bigint,
    attempt integer,
    verb    text NOT NULL,
    data    text
);
CREATE INDEX control_node ON genba.control (node, seq);

CREATE TABLE genba.message (
    seq       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    xid       xid8 NOT NULL DEFAULT pg_current_xact_id(),
    at        bigint NOT NULL,
    job_id    bigint,
    namespace text COLLATE "C" NOT NULL,
    topic     text COLLATE "C",
    data      bytea NOT NULL
);
CREATE INDEX message_job ON genba.message (job_id, seq) WHERE job_id IS NOT NULL;
CREATE INDEX message_topic ON genba.message (namespace, topic, seq) WHERE topic IS NOT NULL;

-- Processes that hold locks outside of jobs, wait for them, or listen to topics.
CREATE TABLE genba.session (
    id          bigint PRIMARY KEY,
    started_at  bigint NOT NULL,
    beat_at     bigint NOT NULL,
    lease_until bigint NOT NULL,
    lease       bigint NOT NULL,
    pid         integer NOT NULL,
    born        bigint NOT NULL,                -- when the process began, as its machine counts
    namespace   text COLLATE "C" NOT NULL,
    host        text NOT NULL,
    machine     text NOT NULL                 -- its boot, and its pid namespace
);
CREATE INDEX session_namespace ON genba.session (namespace, id);

-- Clients that have subscribed to a topic, or wait for messages to a job.
CREATE TABLE genba.listener (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    namespace  text COLLATE "C" NOT NULL,
    topic      text COLLATE "C",
    job_id     bigint,
    session_id bigint,
    bell       bigint NOT NULL,
    passed     bigint NOT NULL                  -- the last message it has read
);
CREATE INDEX listener_topic ON genba.listener (namespace, topic) WHERE topic IS NOT NULL;
CREATE INDEX listener_job ON genba.listener (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX listener_session ON genba.listener (session_id) WHERE session_id IS NOT NULL;

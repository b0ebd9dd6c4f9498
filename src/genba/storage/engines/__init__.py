"""Database engines. One package per database product, behind the protocols in `database.py`.

What an engine must offer, and so what a third one would have to bring:

- durable transactions that read their own writes, and a snapshot for long reads;
- partial indexes, `RETURNING`, upserts and recursive queries: the shared SQL uses them;
- `FOR UPDATE SKIP LOCKED`, or one writing transaction at a time, so that two claims never take the
  same job (`/* lock */` in a query);
- one clock for all processes that use the database: the server's, or the machine's;
- a batch of rows per statement without a round trip per row;
- wake-ups and a lock that is freed when its process dies (`genba.storage.wakeups`);
- a schema that is changed in a transaction, under a lock.

MySQL has no partial indexes and no `RETURNING`, so it cannot be added without new queries for most
of them.
"""

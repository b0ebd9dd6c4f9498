"""The peers, one file each, run in an environment of their own; they see nothing of genba but this folder.

To add a peer, add a file.  Its head says what to install and how it is run:

    # /// script
    # requires-python = ">=3.11"
    # dependencies = ["the-peer", "what-else"]        (the first one gives the version)
    # [tool.bench]
    # title = "The Peer"
    # on = ["postgres"]                               (sqlite, postgres, redis, rabbitmq: once on each)
    # runs = "in-process async"                       (what a job is run in)
    # settings = "which options were taken, and why"
    # ///

and it has these functions, of which those after `workers` may be missing:

    prepare()                       tables, queues: once, before all else
    enqueue(n, payload)             one job, durable when it returns; it must call `job(n, payload)` of effects.py
    left()                          how many jobs are not finished in the peer's own store
    workers(count)                  the commands that start worker processes, `count` at a time in all
    enqueue_many(numbers, payload)  many, in the quickest way the peer documents
    ondemand(count)                 as `workers`, with a process for each job
    enqueue_limited(numbers), enqueue_graph(numbers)   jobs that hold a slot of a limit; that wait for each other
    verify(jobs)                    after a whole drain: what is wrong with the records of so many jobs, or None
    clean()                         removes what a broker that is not ours would keep

`URL` of effects.py is a fresh database, or an empty broker.  In JavaScript it is a file *.mjs that exports the same
functions, which may be async, with the head behind `//`.
"""

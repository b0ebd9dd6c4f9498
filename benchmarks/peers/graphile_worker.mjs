// /// script
// dependencies = ["graphile-worker"]
// [tool.bench]
// title = "graphile-worker"
// on = ["postgres"]
// runs = "in-process (Node.js)"
// settings = "localQueue 500, concurrency 24, completions in batches, a process for each worker"
// ///

import { Logger, makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";

const found = new URL(process.env.BENCH_URL.replace("@/", "@localhost/"));
const pool = new pg.Pool({
  host: found.searchParams.get("host"),
  user: found.username,
  database: found.pathname.slice(1),
  max: 30,
});
const logger = new Logger(() => () => {});
let utils;

export async function prepare() {
  utils = await makeWorkerUtils({ pgPool: pool, logger });
  await utils.migrate();
}

const ready = async () => (utils ??= await makeWorkerUtils({ pgPool: pool, logger }));

export async function enqueue(n, payload) {
  await (await ready()).addJob("job", { n, payload });
}

export async function enqueue_many(numbers, payload) {
  for (let start = 0; start < numbers.length; start += 10000) {
    const part = numbers.slice(start, start + 10000);
    await (await ready()).addJobs(part.map((n) => ({ identifier: "job", payload: { n, payload } })));
  }
}

export async function left() {
  const { rows } = await pool.query("SELECT count(*)::int AS left FROM graphile_worker._private_jobs");
  return rows[0].left;
}

export async function work(job) {
  const runner = await run({
    pgPool: pool,
    logger,
    concurrency: 24,
    noHandleSignals: false,
    taskList: { job: async ({ n }) => job(n) },
    preset: { worker: { localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 } },
  });
  await runner.promise;
}

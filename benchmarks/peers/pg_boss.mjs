// /// script
// dependencies = ["pg-boss@10"]
// [tool.bench]
// title = "pg-boss"
// on = ["postgres"]
// runs = "in-process (Node.js)"
// settings = "batchSize 500, polled every 0.5 s (the least), a process for each worker"
// ///

import PgBoss from "pg-boss";

const found = new URL(process.env.BENCH_URL.replace("@/", "@localhost/"));
const boss = new PgBoss({
  host: found.searchParams.get("host"),
  user: found.username,
  database: found.pathname.slice(1),
  max: 10,
});
boss.on("error", (error) => console.error(error));
let started;

const ready = () => (started ??= boss.start());

export async function prepare() {
  await ready();
  await boss.createQueue("job");
}

export async function enqueue(n, payload) {
  await ready();
  await boss.send("job", { n, payload });
}

export async function enqueue_many(numbers, payload) {
  await ready();
  for (let start = 0; start < numbers.length; start += 10000) {
    const part = numbers.slice(start, start + 10000);
    await boss.insert(part.map((n) => ({ name: "job", data: { n, payload } })));
  }
}

export async function left() {
  await ready();
  const text = "SELECT count(*)::int AS left FROM pgboss.job WHERE state < 'completed'";
  return (await boss.getDb().executeSql(text, [])).rows[0].left;
}

export async function work(job) {
  await ready();
  await boss.work("job", { batchSize: 500, pollingIntervalSeconds: 0.5 }, async (jobs) => {
    for (const { data } of jobs) await job(data.n);
  });
  process.once("SIGTERM", async () => process.exit(await boss.stop({ graceful: false })));
}

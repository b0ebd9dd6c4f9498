// A JavaScript peer's side of the benchmark: the same conversation as side.py; with the word `work` it is a worker.

import { openSync, writeSync } from "node:fs";
import { createInterface } from "node:readline";
import { dirname, join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const file = join(dirname(fileURLToPath(import.meta.url)), process.argv[2]);
const marks = openSync(process.env.BENCH_MARKS, "r+");
const now = () => BigInt(Math.round((performance.timeOrigin + performance.now()) * 1000)) * 1000n;
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function job(n) {
  if (process.env.BENCH_WORK === "cpu") {
    const until = performance.now() + 1;
    while (performance.now() < until);
  } else if (process.env.BENCH_WORK === "io") {
    await pause(5);
  }
  const mark = Buffer.alloc(8);
  mark.writeBigInt64LE(now());
  writeSync(marks, mark, 0, 8, 8 * n);
}

const peer = await import(pathToFileURL(file));

async function singly({ first, count, size }) {
  const payload = "x".repeat(size);
  const began = performance.now();
  for (let n = first; n < first + count; n++) await peer.enqueue(n, payload);
  return { seconds: (performance.now() - began) / 1000 };
}

async function many({ first, count, size, kind }) {
  if (kind) return { lacking: true };
  const payload = "x".repeat(size);
  const numbers = Array.from({ length: count }, (_, i) => first + i);
  const began = performance.now();
  await peer.enqueue_many(numbers, payload);
  return { seconds: (performance.now() - began) / 1000, bulk: true };
}

async function at_times({ first, count, size }) {
  const sent = [];
  for (let n = first; n < first + count; n++) {
    await pause(20 + 30 * Math.random());
    sent.push(Number(now()));
    await peer.enqueue(n, "x".repeat(size));
  }
  return { sent };
}

async function at_pace({ first, count, pace }) {
  const sent = [];
  let moment = performance.now();
  for (let n = first; n < first + count; n++) {
    moment -= (Math.log(1 - Math.random()) / pace) * 1000;
    await pause(Math.max(0, moment - performance.now()));
    sent.push(Number(now()));
    await peer.enqueue(n, "");
  }
  return { sent };
}

const answers = {
  prepare: async () => ({ done: (await peer.prepare()) === undefined }),
  singly,
  many,
  at_times,
  at_pace,
  left: async () => ({ left: await peer.left() }),
  verify: async () => ({ fault: null }),
  clean: async () => ({ done: false }),
  consume: async () => ({ lacking: true }),
  ondemand: async () => ({ commands: [] }),
  workers: async ({ count }) => ({
    commands: Array.from({ length: count }, () => [process.execPath, process.argv[1], process.argv[2], "work"]),
  }),
};

if (process.argv[3] === "work") {
  await peer.work(job);
} else {
  for await (const line of createInterface({ input: process.stdin })) {
    const { do: what, ...asked } = JSON.parse(line);
    process.stdout.write(JSON.stringify(await answers[what](asked)) + "\n");
  }
  process.exit(0);
}

// What @grpc/grpc-js sees of a router, as one JSON object on standard output.
// node client.js ADDRESS PROTO_FOLDERS(:) [CA_FILE]; a line on standard input has it make its last call.
"use strict";

const fs = require("fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, folders, ca] = process.argv.slice(2);
const definition = loader.loadSync(["kvroute/v1/router.proto", "kvroute/v1/fleet.proto"], {
  includeDirs: folders.split(":"),
  keepCase: true,
  longs: Number,
});
const api = grpc.loadPackageDefinition(definition).kvroute.v1;
const credentials = ca
  ? grpc.credentials.createSsl(fs.readFileSync(ca))
  : grpc.credentials.createInsecure();
const client = (options) => new api.Router(address, credentials, options || {});
const router = client();
const fleet = new api.Fleet(address, credentials);
const seen = {};

const tokens = (count) => Array.from({ length: count }, (_, i) => i % 50000);
const request = (more) => ({
  model: "m",
  prompt: "token_ids",
  token_ids: { ids: tokens(64) },
  ...more,
});
const soon = (seconds) => ({ deadline: new Date(Date.now() + 1000 * seconds) });

// Resolves to the answer, or to the error's code, words and keys of its trailing metadata.
const call = (on, method, message, metadata, options) =>
  new Promise((resolve) => {
    on[method](message, metadata || new grpc.Metadata(), options || soon(60), (error, answer) => {
      if (!error) return resolve({ code: 0, answer });
      const trailers = Object.keys(error.metadata.getMap()).filter((name) => name !== "date");
      resolve({ code: error.code, details: error.details, trailers: trailers.sort() });
    });
  });

const code = (result) => result.code;

async function stream(batches, items) {
  const call = router.RouteStream(new grpc.Metadata(), soon(60));
  let results = 0;
  let failed = 0;
  const ended = new Promise((resolve) => call.on("status", (status) => resolve(status.code)));
  call.on("error", () => {});
  call.on("data", (message) => {
    for (const one of message.results || []) {
      if (one.response && one.response.worker_id) results += 1;
      else failed += 1;
    }
  });
  for (let batch = 0; batch < batches; batch += 1) {
    const list = Array.from({ length: items }, (_, i) => ({
      index: batch * items + i,
      request: request({ request_id: `stream-${batch}-${i}` }),
    }));
    if (!call.write({ items: list })) await new Promise((go) => call.once("drain", go));
  }
  call.end();
  return { code: await ended, results, failed };
}

async function cancelled() {
  return new Promise((resolve) => {
    const made = router.Route(
      request({ model: "full" }), new grpc.Metadata(), soon(60),
      (error) => resolve({ code: error && error.code })
    );
    setTimeout(() => made.cancel(), 300);
  });
}

async function main() {
  const first = await call(router, "Route", request());
  seen.route = { code: first.code, worker: first.answer && first.answer.worker_id };
  seen.refused = await call(router, "Route", request({ model: "nobody" }));
  seen.invalid = await call(router, "Route", { model: "m" });
  seen.only_slot = code(await call(router, "Route", request({ model: "full" })));
  seen.late = code(await call(router, "Route", request({ model: "full" }), null, soon(0.3)));
  seen.cancelled = await cancelled();
  seen.stream = await stream(20, 50);
  const many = new grpc.Metadata();
  many.set("x-many", "y".repeat(12000));
  seen.metadata = code(await call(router, "Route", request(), many));
  many.set("x-many", "y".repeat(24000));
  seen.metadata_over = code(await call(router, "Route", request(), many));
  const large = { prompt: "token_ids", token_ids: { ids: tokens(6000000) } };
  seen.large = code(await call(router, "Route", large));
  seen.gzip = code(
    await call(client({ "grpc.default_compression_algorithm": 2 }), "Route", request())
  );
  seen.deflate = code(
    await call(client({ "grpc.default_compression_algorithm": 1 }), "Route", request())
  );
  const all = Array.from({ length: 500 }, () => call(router, "Route", request()));
  seen.at_once = (await Promise.all(all)).filter((one) => one.code === 0).length;
  const workers = await call(fleet, "ListWorkers", {});
  seen.workers = workers.answer.workers.map((one) => one.worker_id).sort();
  const other = grpc.makeClientConstructor({
    Nothing: {
      path: "/kvroute.v1.Router/Nothing", requestStream: false, responseStream: false,
      requestSerialize: (x) => x, requestDeserialize: (x) => x,
      responseSerialize: (x) => x, responseDeserialize: (x) => x,
    },
  });
  seen.unimplemented = code(await call(new other(address, credentials), "Nothing", Buffer.alloc(1)));
  console.log("READY");
  await new Promise((resolve) => process.stdin.once("data", resolve)); // the server has stopped
  seen.stopped = code(await call(router, "Route", request()));
  console.log(JSON.stringify(seen));
  process.exit(0);
}

main();

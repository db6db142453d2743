// A client of @grpc/grpc-js that does what its standard input says: see shell.py.
"use strict";

const fs = require("fs");
const readline = require("readline");
const grpc = require("@grpc/grpc-js");

const given = JSON.parse(process.argv[2]);
const same = (bytes) => bytes; // messages are bytes
const file = (path) => (path ? fs.readFileSync(path) : null);
const credentials = given.ca
  ? grpc.credentials.createSsl(file(given.ca), file(given.key), file(given.certificate))
  : grpc.credentials.createInsecure();
const keepalive = given.keepalive_s
  ? { "grpc.keepalive_time_ms": 1000 * given.keepalive_s, "grpc.keepalive_permit_without_calls": 1 }
  : {};

// A channel of its own by its options: the algorithm is the channel's.
const client = (compression) =>
  new grpc.Client(given.target, credentials, {
    ...keepalive,
    "grpc.max_send_message_length": -1,
    ...(compression ? { "grpc.default_compression_algorithm": compression } : {}),
  });
const plain = client(0);
let packed = null;

function run(wanted) {
  if (wanted.gzip) packed = packed || client(2);
  const by = wanted.gzip ? packed : plain;
  const message = Buffer.from(wanted.message, "base64");
  const options = { deadline: new Date(Date.now() + 1000 * wanted.timeout_s) };
  const metadata = new grpc.Metadata();
  for (const [name, value] of wanted.metadata) {
    metadata.add(name, name.endsWith("-bin") ? Buffer.from(value, "base64") : value);
  }
  let answers = 0;
  let last = Buffer.alloc(0);
  const took = (answer) => {
    if (!answer) return;
    answers += 1;
    last = answer;
  };
  let call;
  if (wanted.op === "call") {
    call = by.makeUnaryRequest(
      wanted.method, same, same, message, metadata, options, (_, answer) => took(answer));
  } else {
    call = by.makeBidiStreamRequest(wanted.method, same, same, metadata, options);
    call.on("error", () => {}); // its status comes, too
    call.on("data", (answer) => {
      took(answer);
      if (answers === wanted.cancel_after) call.cancel();
    });
    let left = wanted.count;
    let over = false;
    const send = () => {
      while (left > 0 && !over) {
        left -= 1;
        if (!call.write(message)) {
          call.once("drain", send);
          return;
        }
      }
      call.end();
    };
    call.once("status", () => (over = true));
    send();
  }
  if (wanted.cancel_s) setTimeout(() => call.cancel(), 1000 * wanted.cancel_s);
  call.on("status", (status) =>
    setImmediate(() => { // after the callback with the answer
      const details = status.metadata.get("grpc-status-details-bin")[0];
      console.log(JSON.stringify({
        id: wanted.id,
        code: status.code,
        words: status.code ? status.details : "",
        answers,
        answer: last.toString("base64"),
        details: details ? details.toString("base64") : "",
      }));
    }));
}

const input = readline.createInterface({ input: process.stdin });
input.on("line", (line) => run(JSON.parse(line)));
input.on("close", () => process.exit(0));

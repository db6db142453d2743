// The console: signs in, listens to the router's events, and draws what changed.

import { Chart } from "./charts.js";
import { Decisions } from "./decisions.js";
import { at, set, write } from "./dom.js";
import { Fleet } from "./fleet.js";
import { digits, percent, seconds } from "./format.js";
import { drawChanges, drawSharedPrefixes, drawQueue, drawRouters, drawTtft, drawWarnings } from "./panels.js";
import { Store, sum } from "./store.js";
import { drawNumbers, drawVerdict } from "./verdict.js";

const QUIET_MS = 4000;
const AGAIN_MS = 2000;
const CHARTS_EVERY = 5;

const store = new Store();
let source = null;
let heard = 0;
let drawn = 0;
let due = false;
let playbook = { warnings: {}, states: {} };
let parts = null;

function charts() {
  const waiting = (point) => sum(Object.values(point.bands));
  return [
    new Chart("Cached share of prompt tokens", [
      { name: "reachable", kind: "b", value: (point) => point.hit_reachable },
      { name: "taken", kind: "a", value: (point) => point.hit_taken, filled: true },
    ], percent, 1),
    new Chart("Time to the first token", [
      { name: "predicted", kind: "b", value: (point) => point.ttft_predicted_s },
      { name: "measured", kind: "a", value: (point) => point.ttft_measured_s },
    ], seconds),
    new Chart("Requests a second", [
      { name: "decided", kind: "a", value: (point) => point.picks_per_s, filled: true },
      { name: "refused", kind: "bad", value: (point) => point.refused_per_s },
    ], digits),
    new Chart("Requests that wait", [{ name: "waiting", kind: "warn", value: waiting, filled: true }], digits),
  ];
}

async function begin() {
  playbook = await (await fetch("playbook.json")).json();
  parts = { fleet: new Fleet(playbook), decisions: new Decisions(), charts: charts() };
  at("charts").append(...parts.charts.map((chart) => chart.element));
  at("sign-in").firstElementChild.addEventListener("submit", signIn);
  at("sign-out").addEventListener("click", signOut);
  setInterval(watchSilence, 1000);
  await enter();
}

/** Connects, or asks for a key. */
async function enter() {
  let response;
  try {
    response = await fetch("session", { cache: "no-store" });
  } catch {
    link("bad", "the router does not answer");
    setTimeout(enter, AGAIN_MS);
    return;
  }
  const content = await response.json().catch(() => ({}));
  at("sign-in").hidden = response.ok;
  at("console").hidden = !response.ok;
  at("sign-out").hidden = !(response.ok && content.identity);
  if (response.ok) {
    listen();
    return;
  }
  link("", "signed out");
  write(at("about"), "");
  const byKey = content.by !== "certificate";
  for (const part of at("sign-in").querySelectorAll("label, input, button")) part.hidden = !byKey;
  if (!byKey) write(at("sign-in-how"), "Callers of this router need a certificate; this browser has shown none that it knows.");
  if (response.status === 403) write(at("sign-in-error"), content.message ?? "");
  if (byKey) at("token").focus();
}

async function signIn(event) {
  event.preventDefault();
  const token = at("token").value;
  at("token").value = "";
  const response = await fetch("session", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token }) });
  const content = await response.json().catch(() => ({}));
  write(at("sign-in-error"), response.ok ? "" : `Not signed in: ${content.message ?? response.status}.`);
  if (response.ok) await enter();
  else at("token").focus();
}

async function signOut() {
  source?.close();
  await fetch("session", { method: "DELETE" });
  location.reload();
}

function listen() {
  source?.close();
  source = new EventSource("events");
  link("", "connecting");
  source.addEventListener("whole", (event) => take("whole", event));
  source.addEventListener("tick", (event) => take("tick", event));
  source.addEventListener("signed_out", () => {
    source.close();
    enter();
  });
  source.addEventListener("error", () => {
    link("bad", "connection lost; trying again");
    // A browser gives up by itself after an answer that is no stream: a session that is over, say.
    if (source.readyState === EventSource.CLOSED) setTimeout(enter, AGAIN_MS);
  });
}

function take(kind, event) {
  store[kind](JSON.parse(event.data));
  heard = performance.now();
  link("good", "live");
  if (kind === "whole") drawn = 0;
  if (!due) {
    due = true;
    requestAnimationFrame(draw);
  }
}

function draw() {
  due = false;
  const { about } = store;
  write(at("about"), `${about.fleet} · ${about.replica} · ${about.version} · up ${seconds(Math.max(1, Math.round(store.at_s - about.started_at_s)))}`);
  drawVerdict(store, playbook);
  drawNumbers(store);
  parts.fleet.draw(store);
  parts.decisions.draw(store);
  drawQueue(store);
  drawTtft(store);
  drawSharedPrefixes(store);
  drawRouters(store);
  drawWarnings(store, playbook, (key) => parts.fleet.show(key));
  drawChanges(store, playbook);
  if (drawn % CHARTS_EVERY === 0) {
    for (const chart of parts.charts) chart.draw(store.points, store.at_s);
    const minutes = Math.round(store.points.length / 6);
    write(at("hour-about"), store.points.length ? `a point each 10 s; ${minutes ? `${minutes} min` : "less than a minute"} so far` : "the first point comes after 10 s");
  }
  drawn += 1;
  document.body.dataset.drawn = String(drawn);
}

function link(kind, text) {
  write(at("link"), text);
  set(at("link"), "class", kind);
  document.body.classList.toggle("stale", kind === "bad");
}

function watchSilence() {
  if (source === null || source.readyState !== EventSource.OPEN || !heard) return;
  const silent_ms = performance.now() - heard;
  if (silent_ms > QUIET_MS) link("bad", `no word for ${Math.round(silent_ms / 1000)} s: what you see is old`);
}

begin();

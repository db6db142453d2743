// What is wrong now, the worst first; and the numbers of the moment.

import { at, el, keyed, set, write } from "./dom.js";
import { count, digits, percent, seconds } from "./format.js";
import { nameOf, stateOf } from "./store.js";

/** [{kind, text, about, target}]: kind is bad or warn. Pure. */
export function troublesOf(store, playbook) {
  const { summary } = store;
  const found = [];
  const say = (kind, text, more = "", todo = "") => found.push({ kind, text, more, todo });
  if (!summary.ready) say("bad", "This router is not ready.", "It waits until its index can be trusted, or ready_timeout_s is over.");
  if (!summary.connected) say("bad", "NATS is away.", "No worker's events, beats or loads arrive: look at the NATS server and the network.");
  const workers = [...store.workers.values()];
  if (!workers.length) say("bad", "No worker is known.", "Look at the relays, at NATS, and at fleet.name.");
  const groups = new Map();
  for (const tile of workers) {
    const state = stateOf(tile);
    if (state.level < 2 || state.word === "serves, with warnings") continue;
    if (!groups.has(state.word)) groups.set(state.word, { kind: state.kind, tiles: [] });
    groups.get(state.word).tiles.push(tile);
  }
  for (const [word, { kind, tiles }] of groups) {
    const names = tiles.slice(0, 5).map(nameOf).join(", ");
    say(kind, `${count(tiles.length, "worker")} ${tiles.length === 1 ? "is" : "are"} ${word}`, `${names}${tiles.length > 5 ? ` and ${tiles.length - 5} more` : ""}`, playbook.states[word.split(",")[0]] ?? "");
  }
  const warned = workers.filter((tile) => stateOf(tile).word === "serves, with warnings");
  if (warned.length) say("warn", `${count(warned.length, "worker")} ${warned.length === 1 ? "has" : "have"} warnings`, `${warned.slice(0, 5).map(nameOf).join(", ")}${warned.length > 5 ? ` and ${warned.length - 5} more` : ""}`, "See Warnings below.");
  const refused = store.rate("refused");
  if (refused > 0) say("bad", `${digits(refused)} requests a second are refused`, reasons(summary.refused));
  const oldest = Math.max(0, ...summary.queue.bands.map((band) => band.oldest_s));
  if (summary.queue.waiting && oldest > 0.5 * summary.queue.timeout_s) {
    say("bad", `${count(summary.queue.waiting, "request waits", "requests wait")}, the oldest for ${seconds(oldest)}`, `They are refused after ${seconds(summary.queue.timeout_s)}: more workers, or fewer requests.`);
  } else if (summary.queue.waiting) {
    say("warn", `${count(summary.queue.waiting, "request waits", "requests wait")} for a worker with room`, `the oldest for ${seconds(oldest)}`);
  }
  return found.sort((a, b) => (a.kind === b.kind ? 0 : a.kind === "bad" ? -1 : 1));
}

function reasons(refused) {
  return Object.entries(refused).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([reason, times]) => `${reason} ${digits(times)}`).join(", ") + " since the start";
}

export function drawVerdict(store, playbook) {
  const troubles = troublesOf(store, playbook);
  const worst = troubles[0]?.kind ?? "good";
  set(at("verdict"), "class", worst);
  const serving = [...store.workers.values()].filter((tile) => stateOf(tile).level === 0 || stateOf(tile).level === 2).length;
  const listed = troubles.length ? troubles : [{ kind: "good", text: `All is well: ${count(serving, "worker")} ${serving === 1 ? "serves" : "serve"}.`, more: "", todo: "" }];
  keyed(at("troubles"), listed, (one) => one.text.replace(/[0-9.,]+/g, "#") + one.kind, (one) =>
    el("li", { class: one.kind }, el("span", { class: `mark ${one.kind}`, "aria-hidden": "true" }), el("b"), " ", el("span", { class: "more" }), " ", el("span", { class: "todo" })), (item, one) => {
    write(item.children[0], one.kind === "bad" ? "✕" : one.kind === "warn" ? "▲" : "✓");
    write(item.children[1], one.text);
    write(item.children[2], one.more);
    write(item.children[3], one.todo);
  });
  document.title = `${worst === "good" ? "" : worst === "bad" ? "✕ " : "▲ "}kvroute ${store.about?.fleet ?? ""}`;
}

export function drawNumbers(store) {
  const { summary, point } = store;
  const workers = [...store.workers.values()];
  const well = workers.filter((tile) => stateOf(tile).level === 0 || stateOf(tile).level === 2).length;
  const rate = store.rate("picks");
  const refused = store.rate("refused");
  const numbers = [
    ["decisions", rate === null ? "–" : `${digits(rate)} /s`, `${digits(summary.picks)} since the start`],
    ["cached tokens", point ? percent(point.hit_taken) : "–", point ? `${percent(point.hit_reachable)} reachable` : "after 10 s", ""],
    ["first token", point ? seconds(point.ttft_measured_s) : "–", point?.ttft_predicted_s ? `${seconds(point.ttft_predicted_s)} predicted` : "as measured"],
    ["waiting", digits(summary.queue.waiting), `${digits(summary.reservations)} open requests`, summary.queue.waiting ? "warn" : ""],
    ["refused", refused === null ? "–" : `${digits(refused)} /s`, `${digits(Object.values(summary.refused).reduce((a, b) => a + b, 0))} since the start`, refused > 0 ? "bad" : ""],
    ["workers", `${well} of ${workers.length}`, "serve", workers.some((tile) => stateOf(tile).level === 3) ? "bad" : ""],
  ];
  keyed(at("numbers"), numbers, ([name]) => name, ([name]) => el("div", { class: "number card" }, el("h3", {}, name), el("p", { class: "big" }), el("p", { class: "small" })), (card, [, big, small, kind]) => {
    write(card.children[1], big);
    write(card.children[2], small);
    set(card, "class", `number card ${kind ?? ""}`);
  });
}

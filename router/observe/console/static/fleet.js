// The fleet as tiles, by model and role; and one worker in full.

import { at, bar, el, keyed, set, write } from "./dom.js";
import { clock, count, digits, percent, seconds } from "./format.js";
import { blocksOf, keyOf, loadOf, nameOf, stateOf } from "./store.js";

const DENSE = 160;
const ROLES = { both: "prefill and decode", prefill: "prefill", decode: "decode" };

export class Fleet {
  constructor(playbook) {
    this.playbook = playbook;
    this.store = null;
    this.open = null;
    this.dialog = at("worker");
    this.dialog.addEventListener("close", () => { this.open = null; });
    this.filter = at("filter");
    this.filter.addEventListener("input", () => this.store && this.draw(this.store, true));
  }

  draw(store, all = false) {
    this.store = store;
    const workers = [...store.workers.values()];
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = workers.filter((tile) => !wanted || about(tile).includes(wanted));
    const dense = shown.length > DENSE;
    at("fleet").classList.toggle("dense", dense);
    const groups = new Map();
    for (const tile of shown) {
      const name = `${tile.model || "model unknown"}\n${tile.role}`;
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(tile);
    }
    const attention = dense ? shown.filter((tile) => stateOf(tile).level >= 2) : [];
    const listed = [...groups.entries()].sort(([a], [b]) => (a < b ? -1 : 1));
    if (attention.length) listed.unshift(["\nattention", attention.sort(worst).slice(0, 24), attention.length]);
    keyed(at("groups"), listed, ([name]) => name, makeGroup, (group, [name, tiles, sum]) => {
      this.drawGroup(group, name, tiles, sum ?? tiles.length, store, all);
    });
    write(at("fleet-sum"), this.sum(workers, shown));
    if (this.open !== null) this.drawWorker();
  }

  sum(workers, shown) {
    const serving = workers.filter((tile) => stateOf(tile).kind === "well" || stateOf(tile).kind === "warn");
    const filtered = shown.length === workers.length ? "" : `; ${shown.length} shown`;
    return `${serving.length} of ${count(workers.length, "worker")} ${serving.length === 1 ? "serves" : "serve"}${filtered}`;
  }

  drawGroup(group, name, tiles, sum, store, all) {
    const [model, role] = name.split("\n");
    const grid = group.querySelector(".tiles");
    if (model) {
      const load = tiles.map(loadOf).filter((share) => share !== null);
      const mean = load.length ? ` · ${percent(load.reduce((a, b) => a + b, 0) / load.length)} of slots in use` : "";
      write(group.querySelector("h3"), model);
      write(group.querySelector("p"), `${ROLES[role] ?? "role unknown"} · ${count(sum, "worker")}${mean}`);
    } else {
      write(group.querySelector("h3"), "Look here first");
      write(group.querySelector("p"), sum > tiles.length ? `${tiles.length} of ${sum} workers that don't serve as they should` : `${count(sum, "worker")} that ${sum === 1 ? "doesn't" : "don't"} serve as ${sum === 1 ? "it" : "they"} should`);
      group.classList.add("attention");
    }
    if (model) tiles.sort(byName);
    keyed(grid, tiles, keyOf, (tile) => this.makeTile(tile), (button, tile) => {
      if (all || button.drawn !== tile) drawTile(button, tile);
      button.drawn = tile;
    });
  }

  makeTile(tile) {
    const key = keyOf(tile);
    return el("button", { type: "button", class: "tile", on: { click: () => this.show(key) } },
      el("span", { class: "name" }), " ", el("span", { class: "mark", "aria-hidden": "true" }), " ",
      bar(0, "load"), bar(0, "blocks"), el("span", { class: "words" }));
  }

  show(key) {
    this.open = key;
    this.drawWorker();
    if (!this.dialog.open) this.dialog.showModal();
  }

  drawWorker() {
    const tile = this.store.workers.get(this.open);
    if (this.drawnWorker === tile && this.dialog.open && tile) return;
    this.drawnWorker = tile;
    const close = el("button", { type: "button", class: "close", on: { click: () => this.dialog.close() } }, "Close");
    if (!tile) {
      this.dialog.replaceChildren(close, el("h2", { id: "worker-title" }, this.open.split("\n")[0]),
        el("p", {}, "This worker is gone: its relay has sent nothing for a while, or it was removed."));
      return;
    }
    const state = stateOf(tile);
    const focused = this.dialog.contains(document.activeElement);
    this.dialog.replaceChildren(close,
      el("h2", { id: "worker-title" }, nameOf(tile)),
      el("p", { class: `state ${state.kind}` }, el("span", { class: `mark ${state.kind}` }, state.mark || "●"), ` ${state.word}`),
      ...this.playbookOf(tile, state),
      facts(tile, this.store.at_s),
      ...warningsOf(tile, this.playbook));
    if (focused) close.focus();
  }

  playbookOf(tile, state) {
    const word = tile.drained ? "drained" : tile.ejected ? "ejected" : tile.stream_state;
    const known = this.playbook.states[word];
    if (!known || state.level === 0) return [];
    return [el("p", { class: "playbook" }, el("b", {}, "What to do: "), known)];
  }
}

function about(tile) {
  const state = stateOf(tile);
  return [tile.worker_id, tile.model, tile.role, tile.engine, tile.address, state.word, state.level >= 2 ? "trouble" : ""].join(" ").toLowerCase();
}

function worst(a, b) {
  return stateOf(b).level - stateOf(a).level || byName(a, b);
}

function byName(a, b) {
  return a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }) || a.dp_rank - b.dp_rank;
}

function makeGroup() {
  return el("section", { class: "group" }, el("header", {}, el("h3"), el("p")), el("div", { class: "tiles" }));
}

function drawTile(button, tile) {
  const state = stateOf(tile);
  const [load, blocks] = [loadOf(tile), blocksOf(tile)];
  const [name, mark, loadBar, blocksBar, words] = button.children;
  set(button, "class", `tile ${state.kind}`);
  write(name, nameOf(tile));
  write(mark, state.mark);
  set(mark, "class", `mark ${state.kind}`);
  fill(loadBar, load);
  fill(blocksBar, blocks);
  const text = state.level >= 1 ? state.word : loadText(tile);
  write(words, text);
  button.style.setProperty("--load", String(Math.min(1, load ?? 0)));
  // It begins with what is to be seen, so that it can be said to a browser that listens.
  const rest = state.level >= 1 ? loadText(tile) : state.word;
  set(button, "aria-label", `${nameOf(tile)} ${text}; ${rest}${blocks === null ? "" : `; ${percent(blocks)} of KV blocks in use`}`);
  set(button, "title", `${nameOf(tile)}: ${state.word}`);
}

function loadText(tile) {
  return `${digits(tile.active_requests)}${tile.slots ? ` of ${tile.slots}` : ""} requests`;
}

function fill(element, share) {
  element.firstChild.style.width = `${100 * Math.min(1, Math.max(0, share ?? 0))}%`;
  element.classList.toggle("unknown", share === null);
  element.classList.toggle("full", (share ?? 0) >= 0.95);
}

function facts(tile, now_s) {
  const rows = [
    ["model", tile.model || "unknown"], ["role", ROLES[tile.role] ?? "unknown"], ["engine", tile.engine || "unknown"],
    ["address", tile.address || "unknown"],
    ["requests", `${digits(tile.active_requests)}${tile.slots ? ` of ${tile.slots} slots${tile.slots_estimated ? " (estimated)" : ""}` : ""}`],
    ["in the engine", `${tile.running ?? 0} running, ${tile.waiting ?? 0} waiting`],
    ["reserved", `${tile.reserved ?? 0} by this router, ${tile.reserved_by_replicas ?? 0} by others`],
    ["prompt tokens to compute", digits(tile.prefill_tokens_active ?? 0)],
    ["KV blocks in use", `${digits(tile.active_blocks)}${tile.total_blocks ? ` of ${digits(tile.total_blocks)} (${percent(blocksOf(tile))})` : ""}`],
    ["blocks cached", `${digits(tile.blocks_held ?? 0)} by its events, ${digits(tile.blocks_predicted ?? 0)} predicted`],
    ["trust in its cache", percent(tile.trust)],
    ...Object.entries(tile.numbers ?? {}).map(([name, number]) => [`the engine's ${name.replaceAll("_", " ")}`, `${Math.round(1000 * number) / 1000}`]),
    ["share of blocks for picks", percent(tile.block_share)],
    ["stream", `${tile.stream_state}${tile.stream_complete ? ", complete" : ", may lack blocks"}${tile.stream_reason && tile.stream_state !== "live" ? `: ${tile.stream_reason}` : ""}`],
  ];
  if (tile.approximate) rows.push(["cache", "known by this router's own picks only"]);
  if (tile.unschedulable_reason) rows.push(["gets no requests", tile.unschedulable_reason]);
  if (tile.beat_late_s) rows.push(["last beat", `${tile.beat_late_s} s ago`]);
  if (tile.ejected) {
    rows.push(["ejected for", tile.ejected.cause],
      ["next probe", `${clock(tile.ejected.until_s)} (in ${seconds(Math.max(0, Math.round(tile.ejected.until_s - now_s)))})`],
      ["times in a row", String(tile.ejected.times ?? 0)]);
  }
  const list = el("dl", { class: "facts" });
  for (const [name, value] of rows) list.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return list;
}

function warningsOf(tile, playbook) {
  const made = [];
  for (const [code, sentence] of tile.warnings ?? []) {
    made.push(el("article", { class: "warning" }, el("h3", {}, el("code", {}, code)), el("p", {}, sentence),
      playbook.warnings[code] ? el("p", { class: "playbook" }, el("b", {}, "Look at: "), playbook.warnings[code].look) : null));
  }
  if (tile.warnings_left_out) made.push(el("p", {}, `${tile.warnings_left_out} more warnings: kvroute workers shows all.`));
  return made;
}

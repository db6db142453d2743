// Sampled decisions, each opening into its receipt: a row a candidate, a bar a term.

import { at, bar, el, keyed, set, write } from "./dom.js";
import { clock, count, digits, percent, seconds } from "./format.js";
import { nameOf } from "./store.js";

const LISTED = 30;

export class Decisions {
  constructor() {
    this.list = at("decisions");
    this.hold = at("hold");
    this.held = null;
    this.opened = new Set();
    this.hold.addEventListener("click", () => {
      this.held = this.held ? null : this.shown;
      set(this.hold, "aria-pressed", this.held ? "true" : "false");
      write(this.hold, this.held ? "Go on" : "Hold");
      if (this.store) this.draw(this.store);
    });
    at("find").addEventListener("submit", (event) => {
      event.preventDefault();
      this.find(at("find-id").value.trim());
    });
  }

  /** Shows the picks of an id that the router remembers; an empty one: none. */
  async find(wanted) {
    this.wanted = wanted;
    at("past").replaceChildren();
    write(at("past-about"), "");
    if (!wanted) return;
    let about = "the router does not answer";
    let decisions = [];
    try {
      const answer = await fetch(`decisions?id=${encodeURIComponent(wanted)}`);
      const told = await answer.json();
      decisions = told.decisions ?? [];
      about = answer.ok ? "no pick of this id is remembered: refused, elsewhere, or over for longer than 1.5 times routing.lease_s" : told.message;
    } catch {
      // The sentence above.
    }
    if (wanted !== this.wanted) return; // another one was looked for meanwhile
    write(at("past-about"), decisions.length ? count(decisions.length, "decision") : about);
    for (const one of decisions) {
      const shown = el("details", { open: true }, summaryOf(one), receipt(one));
      at("past").append(el("li", { class: "picked" }, shown));
    }
  }

  draw(store) {
    this.store = store;
    // What is being read stays: a decision that is open is not pushed out by newer ones.
    const newest = store.decisions.slice(-LISTED).reverse();
    const numbers = new Set(newest.map((one) => one.number));
    const kept = (this.shown ?? []).filter((one) => this.opened.has(one.number) && !numbers.has(one.number));
    this.shown = this.held ?? [...newest, ...kept];
    keyed(this.list, this.shown, (one) => one.number, (one) => this.make(one));
    at("sampled").classList.toggle("empty", this.shown.length === 0);
    const sampled = store.decisions.length ? "drawn at random, about two a second; open one for its receipt" : "none yet: they are sampled while this page watches";
    write(at("sampled-about"), this.held ? "held; newer ones are not shown" : sampled);
  }

  make(one) {
    const details = el("details", {}, summaryOf(one));
    details.addEventListener("toggle", () => {
      if (details.open) {
        this.opened.add(one.number);
        if (details.childElementCount === 1) details.append(receipt(one));
      } else {
        this.opened.delete(one.number);
      }
    });
    return el("li", { class: one.refusal ? "refused" : "picked" }, details);
  }
}

function summaryOf(one) {
  const picked = one.rows?.[0];
  const to = one.refusal ? el("b", { class: "bad" }, one.refusal) : el("b", { class: "to" }, picked ? nameOf(picked) : "–");
  const share = picked && one.prompt_tokens ? picked.usable_tokens / one.prompt_tokens : null;
  return el("summary", {},
    el("time", { datetime: new Date(1000 * one.at_s).toISOString() }, clock(one.at_s)),
    to,
    el("span", { class: "hit" }, share === null ? null : bar(share, "hit"), share === null ? "" : ` ${percent(share)} cached`),
    el("span", { class: "tokens" }, `${digits(one.prompt_tokens ?? 0)} tokens`),
    el("span", { class: "model" }, one.model || "any model"),
    el("span", { class: "notes" }, ...notes(one)));
}

function notes(one) {
  const said = [];
  if (one.state) said.push(el("span", { class: "chip" }, one.state.replaceAll("_", " ")));
  if (one.waited_s) said.push(el("span", { class: "chip" }, `waited ${seconds(one.waited_s)}`));
  if (one.guard) said.push(el("span", { class: "chip warn" }, "guard moved it"));
  if (one.last_resort) said.push(el("span", { class: "chip warn" }, "last resort"));
  if (one.over_estimate) said.push(el("span", { class: "chip warn" }, "over capacity"));
  if (one.pair) said.push(el("span", { class: "chip" }, `prefill ${one.pair}`));
  if (one.otherwise?.agreement === "other") said.push(el("span", { class: "chip" }, `ttft: ${nameOf({ dp_rank: 0, ...one.otherwise })}`));
  return said;
}

function receipt(one) {
  if (one.refusal) {
    return el("div", { class: "receipt" }, el("p", {}, one.message), ids(one));
  }
  if (!one.rows?.length) {
    return el("div", { class: "receipt" }, el("p", {}, "The request had set omit_receipt: the answer has none."), ids(one));
  }
  const parts = [el("div", { class: "receipt" }, story(one), candidates(one))];
  const left = Object.entries(one.excluded ?? {});
  if (left.length) {
    parts[0].append(el("p", {}, el("b", {}, "Excluded: "), left.map(([why, workers]) => `${workers} × ${why}`).join("; ")));
  }
  const constants = Object.entries({ ...one.parameters, ...one.shared_terms });
  parts[0].append(el("p", { class: "formula" }, el("b", {}, `${one.policy}: `), el("code", {}, one.formula || "no formula")));
  if (constants.length) {
    parts[0].append(el("p", { class: "constants" }, constants.map(([name, value]) => `${name} = ${digits(value)}`).join(" · ")));
  }
  parts[0].append(ids(one));
  return parts[0];
}

function ids(one) {
  return el("p", { class: "ids" }, `request ${one.request_id || "without an id"}${one.reservation_id ? ` · reservation ${one.reservation_id}` : ""} · ${one.candidates ?? 0} candidates${one.rows && one.rows.length < (one.candidates ?? 0) ? `, ${one.rows.length} shown` : ""}`);
}

/** The decision in sentences. */
function story(one) {
  const [picked, ...others] = one.rows;
  const able = others.filter((row) => !row.excluded && row.cost !== null);
  const said = [];
  if (one.guard) {
    const left = one.rows[one.guard.cheapest];
    said.push(`The cheapest was ${nameOf(left)}, but ${digits(one.guard.cheapest_wait_tokens)} tokens wait there: more than the shortest wait (${digits(one.guard.least_wait_tokens)}) and the margin (${digits(one.guard.margin_tokens)}). The guard moved the pick to ${nameOf(picked)}, where ${digits(one.guard.picked_wait_tokens)} wait.`);
  } else if (one.tied > 1) {
    said.push(`${one.tied} workers had the lowest cost; ${nameOf(picked)} was drawn.`);
  } else if (able.length && picked.cost !== null) {
    said.push(`${nameOf(picked)} was cheapest, ${digits(able[0].cost - picked.cost)} below ${nameOf(able[0])}.`);
  } else {
    said.push(`${nameOf(picked)} was the only worker that could be picked.`);
  }
  const other = one.otherwise;
  if (other) {
    const name = nameOf({ dp_rank: 0, ...other });
    const sooner = other.sooner_s ?? 0;
    said.push(other.agreement === "same" ? "The policy ttft would have picked the same worker."
      : other.agreement === "tied" ? "The policy ttft would have drawn among several workers, this one included."
      : `The policy ttft would have picked ${name}: the first token ${seconds(Math.abs(sooner))} ${sooner >= 0 ? "sooner" : "later"} by its prediction${sooner < 0 ? ", for room in the cache or a shorter queue" : ""}.`);
  }
  return el("p", { class: "story" }, said.join(" "));
}

function candidates(one) {
  const named = [...new Set(one.rows.flatMap((row) => Object.keys(row.terms)))];
  const terms = named.filter((term) => one.rows.some((row) => row.terms[term] !== 0));
  const stacked = additive(one, terms);
  const most = {};
  for (const term of terms) most[term] = Math.max(...one.rows.map((row) => Math.abs(row.terms[term] ?? 0)));
  const costs = one.rows.filter((row) => !row.excluded && row.cost !== null).map((row) => row.cost);
  const [low, high] = [Math.min(0, ...costs), Math.max(0, ...costs)];
  const head = el("tr", {}, el("th", { scope: "col" }, "candidate"), el("th", { scope: "col" }, "cost"),
    ...terms.map((term) => el("th", { scope: "col" }, stacked.includes(term) ? el("span", { class: `swatch t${stacked.indexOf(term) % 6}` }) : null, term.replaceAll("_", " "))),
    el("th", { scope: "col" }, "cached"), el("th", { scope: "col" }, "first token"), el("th", { scope: "col" }, "there"));
  const body = el("tbody");
  one.rows.forEach((row, place) => {
    body.append(el("tr", { class: place === 0 ? "pick" : row.excluded ? "excluded" : place === one.guard?.cheapest ? "left" : null },
      el("th", { scope: "row" }, place === 0 ? "➜ " : "", nameOf(row), row.excluded ? el("span", { class: "why" }, row.excluded) : null,
        place === one.guard?.cheapest ? el("span", { class: "why" }, "the guard left it") : null),
      el("td", { class: "cost" }, row.excluded ? null : costBar(row, stacked, low, high), el("span", {}, row.cost === null ? "–" : digits(row.cost))),
      ...terms.map((term) => el("td", {}, bar(most[term] ? Math.abs(row.terms[term] ?? 0) / most[term] : 0, "term"), el("span", {}, row.terms[term] === null ? "–" : digits(row.terms[term])))),
      el("td", {}, bar(one.prompt_tokens ? row.usable_tokens / one.prompt_tokens : 0, "hit"), el("span", {}, `${digits(row.usable_tokens)} tok`)),
      el("td", {}, seconds(row.ttft_s)),
      el("td", {}, `${count(row.running + row.waiting + row.reserved, "request")}, ${count(Math.round(row.active_blocks), "block")}`)));
  });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates" },
    el("table", { class: "candidates" }, el("caption", { class: "hidden" }, "Candidates with the terms of their costs"), el("thead", {}, head), body));
}

/** Names of terms whose sum is the cost of each row; empty: there are none. */
export function additive(one, terms) {
  const rows = one.rows.filter((row) => row.cost !== null);
  if (!rows.length) return [];
  for (const wanted of [terms, terms.filter((term) => term.endsWith("_s"))]) {
    const sums = rows.every((row) => {
      const total = wanted.reduce((sum, term) => sum + (row.terms[term] ?? 0), 0);
      return Math.abs(total - row.cost) <= 1e-6 * Math.max(1, Math.abs(row.cost));
    });
    const positive = rows.every((row) => wanted.every((term) => (row.terms[term] ?? 0) >= 0));
    if (wanted.length && sums && positive) return wanted;
  }
  return [];
}

function costBar(row, stacked, low, high) {
  const range = high - low || 1;
  const whole = el("span", { class: "bar cost", "aria-hidden": "true" });
  if (stacked.length) {
    stacked.forEach((term, place) => {
      const part = el("i", { class: `fill t${place % 6}` });
      part.style.width = `${100 * (row.terms[term] ?? 0) / range}%`;
      whole.append(part);
    });
  } else {
    const part = el("i", { class: "fill" });
    part.style.width = `${100 * Math.abs(row.cost) / range}%`;
    part.style.marginLeft = `${100 * ((Math.min(0, row.cost) - low) / range)}%`;
    whole.append(part);
  }
  return whole;
}

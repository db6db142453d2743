// Queue, prefixes, routers, warnings, changes, and what ttft would have done.

import { at, bar, el, keyed, write } from "./dom.js";
import { bytes, clock, count, digits, percent, seconds } from "./format.js";
import { nameOf, sum } from "./store.js";

export function drawQueue(store) {
  const { queue } = store.summary;
  const elsewhere = sum(queue.bands.map((band) => band.elsewhere));
  write(at("queue-sum"), `${count(queue.waiting, "request waits", "requests wait")} here${elsewhere ? `, ${digits(elsewhere)} in other replicas` : ""}`);
  const most = Math.max(1, ...queue.bands.map((band) => band.count + band.elsewhere), ...queue.tenants.map(([, waiting]) => waiting));
  const rows = [...queue.bands].reverse().map((band) => [band.band, band.count, band.elsewhere, band.oldest_s]);
  const parts = [table("By band, the highest first", ["band", "waiting", "oldest", "elsewhere"], rows.map(([name, waiting, others, oldest_s]) =>
    [name, meter(waiting / most, digits(waiting)), waiting ? seconds(oldest_s) : "–", digits(others)]))];
  if (queue.tenants.length) {
    parts.push(table("By tenant, the most first", ["tenant", "waiting"], queue.tenants.map(([tenant, waiting]) =>
      [tenant || "no tenant", meter(waiting / most, digits(waiting))])));
  }
  at("bands").replaceChildren(...parts);
}

export function drawTtft(store) {
  const { otherwise, shadow } = store.summary;
  const made = [];
  write(at("ttft-about"), otherwise.decisions ? `of the last ${count(otherwise.decisions, "sampled decision")}` : "no decision was sampled yet");
  if (otherwise.decisions) {
    made.push(agreement(otherwise.agreement, otherwise.decisions));
    const mean_s = otherwise.sooner_s / otherwise.decisions;
    made.push(el("p", {}, "By its own prediction, first tokens would have come ",
      el("b", {}, `${seconds(Math.abs(mean_s))} ${mean_s >= 0 ? "sooner" : "later"}`), " in the mean, with ",
      el("b", {}, `${digits(Math.abs(otherwise.overlap_tokens / otherwise.decisions))} ${otherwise.overlap_tokens >= 0 ? "more" : "fewer"}`),
      " cached tokens a request."));
    if (store.summary.policy === "ttft") made.push(el("p", {}, "It is the policy of this router: differences are ties and guarded picks."));
  }
  if (shadow) {
    const total = sum(Object.values(shadow.agreement));
    const gain_s = shadow.ttft_gain_s - shadow.ttft_loss_s;
    made.push(el("h3", {}, `Shadow policy ${shadow.policy}, since it was set`), agreement(shadow.agreement, total),
      el("p", {}, `${count(total, "decision")}; first tokens ${seconds(Math.abs(total ? gain_s / total : 0))} ${gain_s >= 0 ? "sooner" : "later"} in the mean.`));
  } else if (made.length) {
    made.push(el("p", { class: "quiet" }, "routing.shadow_policy counts all day, for metrics, too."));
  }
  at("shadow").replaceChildren(...made);
}

const AGREEMENT = [["same", "same worker"], ["tied", "a draw with it"], ["other", "another worker"], ["failed", "failed"]];

function agreement(counts, total) {
  const whole = el("span", { class: "bar agreement", "aria-hidden": "true" });
  const words = [];
  for (const [name, word] of AGREEMENT) {
    const share = (counts[name] ?? 0) / (total || 1);
    if (!share) continue;
    const part = el("i", { class: `fill ${name}` });
    part.style.width = `${100 * share}%`;
    whole.append(part);
    words.push(el("li", {}, el("span", { class: `swatch ${name}` }), ` ${word} `, el("b", {}, percent(share))));
  }
  return el("div", {}, whole, el("ul", { class: "series" }, ...words));
}

export function drawSharedPrefixes(store) {
  const { prompts, roots } = store.prefixes;
  write(at("shared-about"), prompts ? `shared beginnings of the last ${count(prompts, "sampled prompt")}` : "no prompt was sampled yet");
  if (store.drawnSharedPrefixes === store.prefixes) return;
  store.drawnSharedPrefixes = store.prefixes;
  const open = new Set([...at("prefixes").querySelectorAll("details")].filter((one) => !one.open).map((one) => one.dataset.id));
  at("prefixes").replaceChildren(roots.length ? branch(roots, prompts, open) : el("p", { class: "quiet" }, prompts ? "These prompts share nothing." : ""));
}

function branch(nodes, prompts, closed) {
  return el("ul", { class: "tree" }, ...nodes.map((node) => {
    const share = node.prompts / prompts;
    const line = [bar(share, "hit"), el("b", {}, percent(share)), ` ${digits(node.tokens)} tokens `,
      node.model ? el("span", { class: "model" }, node.model) : null, el("code", { class: "quiet" }, node.id.slice(0, 8))];
    const held = holders(node);
    if (!node.children?.length) return el("li", {}, el("div", { class: "node" }, ...line), held);
    const details = el("details", { "data-id": node.id, open: !closed.has(node.id) }, el("summary", { class: "node" }, ...line), held, branch(node.children, prompts, closed));
    return el("li", {}, details);
  }));
}

function holders(node) {
  if (!node.holders?.length) return el("p", { class: "holders quiet" }, "no worker holds it");
  const chips = node.holders.map((holder) => el("span", { class: `chip ${holder.share >= 1 ? "whole" : "part"}` },
    nameOf(holder), holder.share < 1 ? ` ${percent(holder.share)}` : ""));
  return el("p", { class: "holders" }, "held by ", ...chips, node.holders_left_out ? ` and ${node.holders_left_out} more` : "");
}

export function drawRouters(store) {
  const { summary, about } = store;
  write(at("routers-about"), summary.replicas.length ? `${summary.replicas.length + 1} of fleet ${about.fleet}; others by their messages` : `this one alone in fleet ${about.fleet}`);
  const own = [`${about.replica} (this one)`, "now", digits(summary.reservations), digits(sum([...store.workers.values()].map((tile) => tile.prefill_tokens_active ?? 0))), digits(summary.queue.waiting)];
  at("replicas").replaceChildren(table("Routers of the fleet", ["router", "last message", "requests reserved", "prompt tokens", "waiting"],
    [own, ...summary.replicas.map((replica) => [replica.replica, `${seconds(replica.age_s)} ago`, digits(replica.requests), digits(replica.prefill_tokens), digits(replica.waiting)])]),
  el("p", { class: "quiet" }, `index: ${digits(summary.index_blocks)} prefixes, ${bytes(summary.index_bytes)} · guard moved ${digits(summary.guarded)} of ${digits(summary.picks)} picks · ${digits(summary.ejections)} ejections`));
}

export function drawWarnings(store, playbook, show) {
  const codes = new Map();
  for (const [key, tile] of store.workers) {
    for (const [code, sentence] of tile.warnings ?? []) {
      const name = `${code}\n${sentence}`;
      if (!codes.has(name)) codes.set(name, { code, sentence, workers: [] });
      codes.get(name).workers.push([key, tile]);
    }
  }
  const listed = [...codes.values()].sort((a, b) => b.workers.length - a.workers.length).slice(0, 20);
  write(at("mend-sum"), codes.size ? count(codes.size, "kind of warning", "kinds of warnings") : "none");
  keyed(at("warnings"), listed, (one) => `${one.code}\n${one.sentence}\n${one.workers.map(([key]) => key).join()}`, (one) => {
    const some = one.workers.slice(0, 8).map(([key, tile]) => el("button", { type: "button", class: "chip", on: { click: () => show(key) } }, nameOf(tile)));
    return el("li", { class: "warning" }, el("h3", {}, el("code", {}, one.code), ` ${count(one.workers.length, "worker")}`),
      el("p", {}, one.sentence),
      playbook.warnings[one.code] ? el("p", { class: "playbook" }, el("b", {}, "Look at: "), playbook.warnings[one.code].look) : null,
      el("p", { class: "chips" }, ...some, one.workers.length > 8 ? ` and ${one.workers.length - 8} more` : ""));
  });
}

export function drawChanges(store, playbook) {
  const { streams } = store.summary;
  const recoveries = Object.entries(streams.recoveries).map(([name, times]) => `${name} ${digits(times)}`).join(", ");
  write(at("streams"), `${count(streams.gaps, "gap")}, ${count(streams.digest_mismatches, "digest mismatch", "digest mismatches")}; recoveries: ${recoveries || "none"}`);
  const newest = store.news.slice(-40).reverse();
  if (!newest.length) {
    keyed(at("news"), [{ number: "none" }], (one) => one.number, () => el("li", { class: "quiet" }, "No worker's state has changed since this router's start."));
    return;
  }
  const explained = new Set();
  const first = (one) => !explained.has(one.now) && explained.add(one.now);
  keyed(at("news"), newest, (one) => one.number, (one) => el("li", {},
    el("time", { datetime: new Date(1000 * one.at_s).toISOString() }, clock(one.at_s)), " ",
    el("b", {}, nameOf(one)), ` ${one.was} → `, el("b", { class: kindOf(one.now) }, one.now), one.why ? el("span", { class: "quiet" }, ` ${one.why}`) : null,
    el("p", { class: "playbook" })), (item, one) => {
    const known = kindOf(one.now) !== "good" && playbook.states[one.now];
    write(item.lastChild, known && first(one) ? known : "");
  });
}

function kindOf(state) {
  if (["silent", "ejected", "gone", "no heartbeat"].includes(state)) return "bad";
  return ["recovering", "suspect", "drained"].includes(state) ? "warn" : "good";
}

function meter(share, text) {
  return el("span", { class: "metered" }, bar(share, "wait"), el("span", {}, text));
}

function table(caption, columns, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((cell) => el("td", {}, cell)))))));
}

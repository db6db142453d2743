// What the router said so far: one whole, then ticks. Pure.

const DECISIONS_MAX = 64;
const NEWS_MAX = 200;
const POINTS_MAX = 360;

export function nameOf(tile) {
  return tile.dp_rank ? `${tile.worker_id} · ${tile.dp_rank}` : tile.worker_id;
}

export function keyOf(tile) {
  return `${tile.worker_id}\n${tile.dp_rank}`;
}

export class Store {
  constructor() {
    this.about = null;
    this.at_s = 0;
    this.workers = new Map();
    this.summary = null;
    this.points = [];
    this.decisions = [];
    this.news = [];
    this.prefixes = { prompts: 0, roots: [] };
    this.live = [];
  }

  whole(message) {
    const marks = this.live;
    Object.assign(this, new Store());
    this.live = marks;
    this.about = message.about;
    this.tick(message);
  }

  tick(message) {
    for (const tile of message.workers) this.workers.set(keyOf(tile), tile);
    for (const [worker, rank] of message.gone ?? []) this.workers.delete(`${worker}\n${rank}`);
    this.summary = message.summary;
    // Readings of late, for rates of the last seconds.
    this.live.push({ at_s: message.at_s, picks: message.summary.picks,
      refused: sum(Object.values(message.summary.refused)) });
    this.live = this.live.filter((one) => message.at_s - one.at_s <= 10 && one.at_s <= message.at_s);
    this.at_s = message.at_s;
    this.points = last([...this.points, ...message.points], POINTS_MAX);
    this.decisions = last([...this.decisions, ...message.decisions], DECISIONS_MAX);
    this.news = last([...this.news, ...message.news], NEWS_MAX);
    if (message.prefixes) this.prefixes = message.prefixes;
  }

  /** A second, over the last seconds; null: too few readings. */
  rate(name) {
    const [first, final] = [this.live[0], this.live.at(-1)];
    if (!first || final.at_s - first.at_s < 0.5) return null;
    return (final[name] - first[name]) / (final.at_s - first.at_s);
  }

  get point() {
    return this.points.at(-1) ?? null;
  }
}

export function sum(numbers) {
  let total = 0;
  for (const number of numbers) total += number;
  return total;
}

function last(list, most) {
  return list.length > most ? list.slice(-most) : list;
}

/** A worker's state: a word, a mark, and how bad it is: 0 well, 1 at rest, 2 warning, 3 bad. */
export function stateOf(tile) {
  if (tile.drained) return { word: "drained", mark: "‖", kind: "rest", level: 1 };
  if (tile.ejected) {
    const word = tile.ejected.probing ? "ejected, being probed" : "ejected";
    return { word, mark: "⊘", kind: "bad", level: 3 };
  }
  if (tile.stream_state === "silent") return { word: "silent", mark: "✕", kind: "bad", level: 3 };
  if (tile.unschedulable_reason) {
    return { word: `unschedulable: ${tile.unschedulable_reason}`, mark: "✕", kind: "bad", level: 3 };
  }
  if (tile.stream_state !== "live") {
    return { word: tile.stream_state, mark: "↻", kind: "warn", level: 2 };
  }
  if (tile.last_resort) return { word: "last resort", mark: "▲", kind: "warn", level: 2 };
  if (tile.warnings?.some(([code]) => code !== "approximate" && code !== "priority_ignored")) {
    return { word: "serves, with warnings", mark: "▲", kind: "warn", level: 2 };
  }
  return { word: "serves", mark: "", kind: "well", level: 0 };
}

/** Requests of slots, 0 to 1 and beyond; null: unknown. */
export function loadOf(tile) {
  return tile.slots ? tile.active_requests / tile.slots : null;
}

/** KV blocks in use, 0 to 1 and beyond; null: unknown. */
export function blocksOf(tile) {
  return tile.total_blocks ? tile.active_blocks / tile.total_blocks : null;
}

// Lines over the last hour, drawn as SVG; gaps where a value is not known.

import { el, write } from "./dom.js";
import { clock } from "./format.js";

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 420;
const HEIGHT = 140;
const LEFT = 46;
const BOTTOM = 20;
const TOP = 8;
const SPANS_MIN = [10, 30, 60];

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A number at or above the largest that reads well: 1, 2, 2.5 or 5 times a power of ten. */
export function ceiling(largest) {
  if (!(largest > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(largest));
  for (const step of [1, 2, 2.5, 5, 10]) if (largest <= step * power * 1.0001) return step * power;
  return 10 * power;
}

/** Pieces of a line: [[x, y], ...] without its gaps. */
export function pieces(points, value, gap_s = 35) {
  const found = [];
  let piece = [];
  let before = null;
  for (const point of points) {
    const y = value(point);
    if (y === null || y === undefined || (before !== null && point.at_s - before > gap_s)) {
      if (piece.length) found.push(piece);
      piece = [];
    }
    if (y !== null && y !== undefined) piece.push([point.at_s, y]);
    before = point.at_s;
  }
  if (piece.length) found.push(piece);
  return found;
}

/** Minutes that a chart shows: an hour, or less while the points are younger. */
export function span(points, now_s) {
  const age_s = points.length ? now_s - points[0].at_s : 0;
  return SPANS_MIN.find((minutes) => age_s <= 60 * minutes - 30) ?? SPANS_MIN.at(-1);
}

export class Chart {
  /** series: [{name, kind, value(point), stacked}]; shown: a value as text; top: fixed, or null. */
  constructor(title, series, shown, top = null) {
    this.title = title;
    this.series = series;
    this.shown = shown;
    this.top = top;
    this.legend = el("ul", { class: "series" });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
      preserveAspectRatio: "none" });
    this.values = el("p", { class: "reading" });
    this.element = el("figure", { class: "chart card" },
      el("figcaption", {}, el("h3", {}, title), this.legend), this.picture, this.values);
    this.picture.addEventListener("pointermove", (event) => this.read(event));
    this.picture.addEventListener("pointerleave", () => write(this.values, ""));
    this.points = [];
  }

  draw(points, now_s) {
    this.points = points;
    const lines = this.series.map((one) => pieces(points, one.value));
    const largest = Math.max(0, ...lines.flat(2).map(([, y]) => y));
    const top = this.top ?? ceiling(largest);
    const minutes = span(points, now_s);
    this.span = [now_s - 60 * minutes, now_s];
    const x = (at_s) => LEFT + ((at_s - this.span[0]) / (60 * minutes)) * (WIDTH - LEFT - 6);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - TOP);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const height = y(share * top);
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - 6, y1: height, y2: height }));
      const label = svg("text", { class: "tick", x: LEFT - 6, y: height + 4, "text-anchor": "end" });
      label.textContent = this.shown(share * top);
      parts.push(label);
    }
    for (const share of [1, 0.5, 0]) {
      const ago = share * minutes;
      const place = x(now_s - 60 * ago);
      const anchor = share === 1 ? "start" : share === 0 ? "end" : "middle";
      const label = svg("text", { class: "tick", x: place, y: HEIGHT - 5, "text-anchor": anchor });
      label.textContent = ago ? `−${ago} min` : "now";
      parts.push(label);
    }
    lines.forEach((line, place) => {
      for (const piece of line) parts.push(...this.piece(piece, this.series[place], x, y));
    });
    this.picture.replaceChildren(...parts);
    const last = points.at(-1);
    const now = this.series.map((one) => `${one.name} ${this.text(one, last)}`).join(", ");
    this.picture.setAttribute("aria-label", `${this.title}, the last ${minutes} minutes; latest: ${now}`);
    this.legend.replaceChildren(...this.series.map((one) =>
      el("li", {}, el("span", { class: `swatch ${one.kind}` }), `${one.name} `,
        el("b", {}, this.text(one, last)))));
  }

  piece(piece, one, x, y) {
    const path = piece.map(([at_s, value], i) => `${i ? "L" : "M"}${x(at_s).toFixed(1)} ${y(value).toFixed(1)}`);
    if (piece.length === 1) {
      const [[at_s, value]] = piece;
      return [svg("circle", { class: `dot ${one.kind}`, cx: x(at_s), cy: y(value), r: 2 })];
    }
    const line = svg("path", { class: `line ${one.kind}`, d: path.join("") });
    if (!one.filled) return [line];
    const [from, to] = [x(piece[0][0]).toFixed(1), x(piece.at(-1)[0]).toFixed(1)];
    const area = svg("path", { class: `area ${one.kind}`, d: `${path.join("")}L${to} ${y(0)}L${from} ${y(0)}Z` });
    return [area, line];
  }

  /** Value of a series at a point, as text. */
  text(one, point) {
    const value = point ? one.value(point) : null;
    return value === null || value === undefined ? "–" : this.shown(value);
  }

  /** The values beneath the pointer. */
  read(event) {
    const box = this.picture.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - 6);
    const at_s = this.span[0] + share * (this.span[1] - this.span[0]);
    let nearest = null;
    for (const point of this.points) {
      if (nearest === null || Math.abs(point.at_s - at_s) < Math.abs(nearest.at_s - at_s)) nearest = point;
    }
    if (nearest === null) return;
    const values = this.series.map((one) => `${one.name} ${this.text(one, nearest)}`);
    write(this.values, `${clock(nearest.at_s)}: ${values.join(" · ")}`);
  }
}

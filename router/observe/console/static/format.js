// Numbers and times as text.

const SMALL = [[1, "s", 1], [1e-3, "ms", 1e3], [1e-6, "µs", 1e6]];

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size >= 7200) return `${(value / 3600).toFixed(1)} h`;
  if (size >= 120) return `${Math.round(value / 60)} min`;
  for (const [least, unit, times] of SMALL) {
    if (size >= least) return `${digits(value * times)} ${unit}`;
  }
  return `${digits(value * 1e6)} µs`;
}

export function digits(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 0 : 1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size >= 1e5 ? 0 : 1)} k`;
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  if (size >= 10) return value.toFixed(1);
  return Number(value.toPrecision(3)).toString();
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = 100 * share;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

export function bytes(count) {
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (count >= size) return `${digits(count / size)} ${unit}`;
  }
  return `${count} B`;
}

/** Time of day of a Unix time. */
export function clock(at_s) {
  return new Date(1000 * at_s).toLocaleTimeString([], { hour12: false });
}

export function count(number, one, many = `${one}s`) {
  return `${digits(number)} ${number === 1 ? one : many}`;
}

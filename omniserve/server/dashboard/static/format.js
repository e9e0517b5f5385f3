// Numbers with their units, short enough for a tile.

const NONE = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9, digits)} G`;
  if (size >= 1e6) return `${trim(value / 1e6, digits)} M`;
  if (size >= 1e4) return `${trim(value / 1e3, digits)} k`;
  return trim(value, digits);
}

function trim(value, digits) {
  const size = Math.abs(value);
  if (size >= 10 ** (digits - 1)) return String(Math.round(value));
  return String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  return size < 1 ? `${trim(value * 1e3, size < 0.1 ? 2 : 3)} ms` : `${trim(value, 3)} s`;
}

export function percent(value) {
  if (value === null || value === undefined) return NONE;
  const points = value * 100;
  return `${points > 0 && points < 10 ? points.toFixed(1) : points > 99 && points < 100 ? points.toFixed(1) : Math.round(points)} %`;
}

export function rate(unit) {
  return (value) => (value === null || value === undefined ? NONE : `${number(value)} ${unit}`);
}

export function times(value) {
  return value === null || value === undefined ? NONE : `${trim(value, 3)} ×`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString();
}

// "in 5 min", "3 h ago": of a time in seconds since 1970.
export function fromNow(unixSeconds) {
  const away = unixSeconds - Date.now() / 1000;
  const size = Math.abs(away);
  const [count, unit] = size < 90 ? [size, "s"] : size < 5400 ? [size / 60, "min"] : size < 129600 ? [size / 3600, "h"] : [size / 86400, "d"];
  const text = `${Math.round(count)} ${unit}`;
  return away >= 0 ? `in ${text}` : `${text} ago`;
}

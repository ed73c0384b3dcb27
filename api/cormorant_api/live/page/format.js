// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clockTime = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const count = (value) => whole.format(value);

export function number(value) {
  if (value === null || value === undefined) return "–";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/** A date, an ISO string, or seconds since 1970, as local time of day. */
export function clock(when) {
  return clockTime.format(typeof when === "number" ? new Date(when * 1000) : new Date(when));
}

/** A span of time, roughly. */
export function duration(seconds) {
  if (seconds < 60) return `${Math.ceil(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

export function millis(value) {
  if (value === null || value === undefined) return "–";
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

export function bytes(value) {
  let size = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024 || unit === "GiB") return unit === "B" ? `${size} B` : `${size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
}

export const percent = (share) => `${Math.round(100 * share)} %`;

export const words = (name) => name.replaceAll("_", " ");

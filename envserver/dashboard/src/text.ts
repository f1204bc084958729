// Text from outside is only ever a text node. Control and bidi characters are made visible.

const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]|\p{Cs}/gu;

/** Replaces characters that would not be seen, or would change the order of others: "\u202e". */
export function visible(text: string): string {
  return String(text).replace(HIDDEN, escaped);
}

/** Any other blank, and a space at an end or beside another one. */
const BLANK = /^ | $| (?= )|[^\S ]|[\u115f\u1160\u2800\u3164\uffa0]/gu;

/** A name on one line: blanks that would not be seen are escapes, too, so no two names look alike. */
export function named(text: string): string {
  return visible(text).replace(BLANK, escaped);
}

function escaped(c: string): string {
  return `\\u${c.codePointAt(0)!.toString(16).padStart(4, "0")}`;
}

/** Shortens text to `most` characters. */
export function shortened(text: string, most: number): string {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

/** A reward or share with three digits: 0.305, 12.5, −1. */
export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

/** Seconds as people say them: 0.4 s, 12 s, 3 min, 2 h. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${number(seconds, 2)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${number(seconds / 3600, 3)} h`;
}

/** The time of day, and the day unless it is today. `seconds` since 1970. */
export function clock(seconds: number): string {
  const at = new Date(seconds * 1000);
  const time = at.toLocaleTimeString("en-GB");
  const now = new Date();
  if (at.toDateString() === now.toDateString()) return time;
  const day = at.toLocaleDateString("en-CA");
  return `${at.getFullYear() === now.getFullYear() ? day.slice(5) : day} ${time}`;
}

/** A number of bytes or characters as people say it: 812, 12 k, 3.4 M. */
export function amount(value: number): string {
  if (value < 10_000) return value.toLocaleString("en");
  return value < 1e6 ? `${number(value / 1e3)} k` : `${number(value / 1e6)} M`;
}

/** Seconds by which the server's clock is ahead of this computer's. */
let ahead = 0;

/** Tells what the server's clock shows now, in seconds since 1970. */
export function setServerTime(seconds: number): void {
  ahead = seconds - Date.now() / 1000;
}

/** Clocks differ by a little: so many seconds ahead is now. */
const SKEW = 5;

/** Seconds ago in words, by the server's clock; the time where that says more. */
export function ago(seconds: number, now: number = Date.now() / 1000 + ahead): string {
  const past = now - seconds;
  return past < -SKEW || past > 86_400 ? clock(seconds) : past < 1 ? "now" : duration(past);
}

/** JSON with line breaks; text stays as it is. */
export function asText(value: unknown): string {
  return typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
}

/** "1 token", "2 tokens". */
export function count(value: number, one: string, many = `${one}s`): string {
  return `${value.toLocaleString("en")} ${value === 1 ? one : many}`;
}

/** A word for a shell, quoted where it must be. */
export function quoted(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

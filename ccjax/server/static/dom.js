// Small helpers to build elements. Text only ever becomes a text node, since passages and answers are untrusted.

/** An element with a class, attributes and children; strings among these become text. */
export function el(name, options = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Places a node by percentages; through the CSSOM, which the page's policy allows. */
export function place(node, left, width) {
  node.style.left = `${clamp(left)}%`;
  node.style.width = `${clamp(width)}%`;
  return node;
}

const clamp = (percent) => Math.max(0, Math.min(100, Number.isFinite(percent) ? percent : 0)).toFixed(3);

/** A time in seconds for people. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  const ms = seconds * 1000;
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  return `${seconds < 99.5 ? seconds.toFixed(2) : Math.round(seconds)} s`;
}

const integers = new Intl.NumberFormat("en");
export const count = (number) => integers.format(number);

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (number >= 1024 && at < units.length - 1) {
    number /= 1024;
    at += 1;
  }
  return `${at && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[at]}`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** Definition list entries: [[name, value, class?], ...]. */
export function definitions(list, entries) {
  list.replaceChildren(
    ...entries.map(([name, value, kind]) => el("div", { class: kind }, el("dt", {}, name), el("dd", {}, value))),
  );
}

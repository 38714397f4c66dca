// The live view: polls the server's state while the page is visible.

import { key, getJson } from "./api.js";
import { byId, bytes, count, definitions, el, percent, place, time } from "./dom.js";

const EVERY_MS = 2000;
const MOST_PROBLEMS = 200;
const SVG = "http://www.w3.org/2000/svg";

/** Polls until the page is closed. Calls `onState(state, text, numPassages)` with "ok", "wait", "down" or "key". */
export function watch(onState) {
  let timer = 0;
  let under_way = false;

  async function look() {
    clearTimeout(timer);
    if (document.hidden || under_way) return;
    under_way = true;
    try {
      const live = await getJson("v1/live");
      show(live);
      onState("ok", live.model, live.num_passages);
    } catch (error) {
      byId("live-note").textContent = "Last known state; trying again.";
      byId("live-note").hidden = false;
      if (error.status === 401) onState("key", key.get() ? "this key is not the server's" : "a key is needed");
      else if (error.status === 503) onState("wait", await loading());
      else onState("down", error.message);
    } finally {
      under_way = false;
      timer = setTimeout(look, EVERY_MS);
    }
  }

  document.addEventListener("visibilitychange", look);
  look();
  return look;
}

/** The server's loading progress. */
async function loading() {
  try {
    const told = await fetch("ready", { cache: "no-store" }).then((response) => response.json());
    if (told.status !== "loading") return told.status;
    return told.total > 1
      ? `loading: ${told.stage}, ${told.done} of ${told.total}`
      : `loading: ${told.stage ?? "start"}`;
  } catch {
    return "not ready";
  }
}

function show(live) {
  byId("live").hidden = false;
  byId("live-note").hidden = true;
  definitions(byId("queue"), [
    ...(live.replicas ? [["replicas", count(live.replicas.length)]] : []),
    ["running", count(live.queue.running)],
    ["in line", count(live.queue.waiting)],
    ["answered", count(live.answered)],
    ["pages in use", percent(live.pages.used / live.pages.total)],
    ["chunk variants", count(live.num_variants)],
  ]);
  showShare(live.tokens);
  showSpark(live.recent.map((one) => one.ttft_s));
  byId("tiers").tBodies[0].replaceChildren(...live.tiers.map(tier));
  showIndex(live);
  showDocuments(live.documents);
}

function showShare(tokens) {
  const total = tokens.reused + tokens.recomputed + tokens.computed;
  const names = ["reused", "recomputed", "computed"];
  byId("share").replaceChildren(
    ...names.map((name) => {
      const part = el("i", { class: name });
      part.style.flexGrow = tokens[name];
      return part;
    }),
  );
  byId("share-note").textContent = total
    ? `${names.map((name) => `${percent(tokens[name] / total)} ${name}`).join(", ")} of ${count(total)} tokens.`
    : "No question so far.";
}

function showSpark(seconds) {
  const box = byId("spark");
  if (!seconds.length) {
    box.replaceChildren();
    byId("spark-note").textContent = "No question so far.";
    return;
  }
  const highest = Math.max(...seconds);
  const x = (at) => (seconds.length === 1 ? 120 : 2 + (236 * at) / (seconds.length - 1));
  const y = (value) => 38 - (34 * value) / highest;
  const line = document.createElementNS(SVG, seconds.length === 1 ? "circle" : "polyline");
  if (seconds.length === 1) {
    for (const [name, value] of [
      ["cx", 120],
      ["cy", y(seconds[0])],
      ["r", 2],
    ])
      line.setAttribute(name, value);
  } else {
    line.setAttribute("points", seconds.map((value, at) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" "));
  }
  box.replaceChildren(line);
  const sorted = [...seconds].sort((a, b) => a - b);
  const rank = (share) => sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)];
  byId("spark-note").textContent =
    `Of the last ${seconds.length}, including the queue: ` +
    `half within ${time(rank(0.5))}, 95 % within ${time(rank(0.95))}.`;
}

function tier(usage) {
  const asked = usage.hits + usage.misses;
  const fill = place(el("i"), 0, usage.budget_bytes ? (100 * usage.used_bytes) / usage.budget_bytes : 0);
  const room = usage.budget_bytes === null ? "no limit" : `of ${bytes(usage.budget_bytes)}`;
  return el(
    "tr",
    { "data-tier": usage.tier },
    el("th", { scope: "row" }, usage.tier),
    el("td", {}, bytes(usage.used_bytes), " ", el("small", {}, room), el("div", { class: "track" }, fill)),
    el("td", {}, count(usage.num_variants)),
    el(
      "td",
      {},
      asked ? percent(usage.hits / asked) : "none",
      " ",
      el("small", {}, asked ? `of ${count(asked)}` : "asked"),
    ),
  );
}

/** How much of the server's folder is searchable, and what is not, by reason. */
function showIndex(live) {
  const skipped = Object.entries(live.skipped);
  const total = skipped.reduce((sum, [, number]) => sum + number, 0);
  byId("index").hidden = !live.num_documents && !total;
  const pending = live.num_vectors_pending ? `, ${count(live.num_vectors_pending)} of them found by words alone so far` : "";
  byId("index-note").textContent =
    `${count(live.num_documents)} documents, ${count(live.num_passages)} passages${pending}.`;
  byId("problems").hidden = !total;
  const reasons = skipped.map(([reason, number]) => `${count(number)} ${reason}`).join(", ");
  const note = `Skipped: ${reasons}`;
  if (byId("problems-note").textContent === note) return;
  byId("problems-note").textContent = note;
  byId("problems").open = false; // the list of before
}

/** Lists the files that are skipped, whenever the list is opened. */
export async function listProblems() {
  if (!byId("problems").open) return;
  const list = byId("problem-list");
  try {
    const told = await getJson("v1/documents/problems");
    const types = Object.entries(told.unsupported).map(([suffix, number]) => `${suffix || "no suffix"}: ${count(number)}`);
    list.replaceChildren(
      ...told.data.slice(0, MOST_PROBLEMS).map((one) => el("li", {}, `${one.path}: ${one.reason}`)),
      ...(told.data.length > MOST_PROBLEMS ? [el("li", {}, `${count(told.data.length - MOST_PROBLEMS)} more`)] : []),
      ...(types.length ? [el("li", {}, `files of types that are not read: ${types.join(", ")}`)] : []),
    );
  } catch (error) {
    list.replaceChildren(el("li", {}, error.message));
  }
}

function showDocuments(documents) {
  byId("hot-note").textContent = documents.length ? "" : "None of the server's own documents was requested so far.";
  byId("hot").hidden = !documents.length;
  byId("hot").tBodies[0].replaceChildren(
    ...documents.map((one) =>
      el(
        "tr",
        {},
        el("th", { scope: "row", title: one.id }, one.title ?? one.id),
        el("td", {}, count(one.requests)),
        el("td", {}, percent(one.tokens ? one.reused_tokens / one.tokens : 0)),
      ),
    ),
  );
}

// Shows the prompt segment by segment, each token with a mark of its action.

import { byId, count, definitions, el, percent } from "./dom.js";

const CAUSES = {
  question: ["always computed", "The end of a prompt is never stored."],
  new: ["new text", "No KV of this text is stored."],
  edited: ["edited", "The text before it is stored, and goes on differently there."],
  short: ["too short", "Text between passages that is too short to be stored."],
  prefix: ["other text before it", "Its KV is stored only behind other text than here, which it may not be reused behind."],
  mode: ["not by this mode", "Its KV is stored, but the request's reuse mode, or the strategy, does not use it."],
  load: ["computing was quicker", "Its KV is stored, but loading it would have taken longer than computing it."],
  failed: ["could not be loaded", "Its stored KV could not be read, or not in time."],
  evicted: ["evicted", "Its KV was evicted, or not stored, for want of space."],
};
const TIERS = { device: "device memory", host: "host memory", disk: "disk" };

/** One mark per token of a segment: "reused", "recomputed" or "computed". */
export function marks(segment) {
  if (segment.action === "compute") return segment.tokens.map(() => "computed");
  const again = new Set(segment.recomputed_offsets);
  const others = segment.computed_tokens ? "computed" : "reused"; // computed: prepared for this prompt
  return segment.tokens.map((_, offset) => (again.has(offset) ? "recomputed" : others));
}

export function showPrompt(trace, reuse) {
  const total = reuse.prompt_tokens;
  definitions(byId("sums"), [
    ["tokens", count(total)],
    ["reused", `${count(reuse.reused_tokens)} (${percent(reuse.reused_tokens / total)})`, "reused"],
    ["recomputed", `${count(reuse.recomputed_tokens)} (${percent(reuse.recomputed_tokens / total)})`, "recomputed"],
    ["computed", `${count(reuse.computed_tokens)} (${percent(reuse.computed_tokens / total)})`, "computed"],
    ["of a full prefill's work", percent(reuse.computed_share)],
  ]);
  const segments = trace.segments.map((segment) => ({ ...segment, marks: marks(segment) }));
  byId("strip").replaceChildren(...segments.map(strip));
  let number = 0;
  byId("segments").replaceChildren(
    ...segments.map((segment) => card(segment, segment.role === "passage" ? ++number : 0, trace.num_layers)),
  );
}

function runs(list) {
  const found = [];
  list.forEach((mark, at) => {
    if (found.length && found.at(-1).mark === mark) found.at(-1).end = at + 1;
    else found.push({ mark, start: at, end: at + 1 });
  });
  return found;
}

function strip(segment) {
  const node = el("div", { class: "part" });
  node.style.flexGrow = segment.num_tokens;
  for (const run of runs(segment.marks)) {
    const part = el("i", { class: run.mark });
    part.style.flexGrow = run.end - run.start;
    node.append(part);
  }
  return node;
}

function card(segment, number, numLayers) {
  const names = { instructions: "Instructions", text: "Text", answer: "Answer", question: "Question, and the borders of the turns" };
  const title = names[segment.role] ?? segment.title ?? segment.document_id ?? "Passage";
  const badges = [];
  if (segment.action === "reuse") {
    badges.push(badge(`from ${TIERS[segment.tier] ?? segment.tier ?? "the store"}`, `tier-${segment.tier}`));
    badges.push(segment.exact ? badge("exact") : badge("approximate"));
  } else {
    const [name, reason] = CAUSES[segment.cause] ?? CAUSES.new;
    badges.push(badge(name, "", reason));
  }
  if (segment.focused === true) badges.push(badge("in focus"));
  if (segment.focused === false) badges.push(badge("out of focus"));
  const head = el(
    "div",
    { class: "head" },
    el("h3", {}, number ? `${number}. ${title}` : title),
    el("div", { class: "badges" }, ...badges),
  );
  const numbers = el("dl", { class: "facts" });
  const facts = [
    ["reused", segment.reused_tokens],
    ["recomputed", segment.recomputed_tokens],
    ["computed", segment.computed_tokens],
  ]
    .filter(([, value]) => value > 0)
    .map(([name, value]) => [name, count(value)]);
  if (segment.action === "reuse" && segment.cfo !== null) facts.push(["CFO", segment.cfo.toFixed(2)]);
  if (segment.cci !== null) facts.push(["CCI", segment.cci.toFixed(2)]);
  if (segment.recomputed_layers && segment.recomputed_layers < numLayers) {
    facts.push(["recomputed in", `at least ${segment.recomputed_layers} of ${numLayers} layers`]);
  }
  definitions(numbers, facts);
  const text = el("p", { class: "text", translate: "no" });
  const end = segment.tokens.findLastIndex((piece) => piece.trim() !== "") + 1;
  segment.tokens.forEach((piece, at) => text.append(token(piece, segment.marks[at], at < end)));
  return el("li", { class: `segment ${segment.role}` }, head, numbers, cfoBar(segment), text);
}

const badge = (text, kind = "", title = null) => el("span", { class: `badge ${kind}`, title }, text);

function cfoBar(segment) {
  if (segment.action !== "reuse" || segment.role !== "passage" || !segment.cfo) return "";
  const fill = el("i");
  fill.style.width = `${Math.min(100, 100 * segment.cfo)}%`;
  const label = `CFO ${segment.cfo.toFixed(2)}: share of the passage that its new context would have recomputed`;
  return el("div", { class: "cfo", role: "img", "aria-label": label, title: label }, fill);
}

/** A token; one without text of its own (a border, half a character) is a dot, the end of a line an arrow. */
function token(piece, mark, breaks) {
  if (piece === "") return el("span", { class: `t ${mark} silent`, title: `${mark}; no text of its own` }, "\u00b7");
  const isSilent = piece.includes("\n") && piece.trim() === "";
  const shown = piece.replaceAll("\n", breaks ? "\u21b5\n" : "\u21b5");
  return el("span", { class: `t ${mark}${isSilent ? " silent" : ""}`, title: mark }, shown);
}

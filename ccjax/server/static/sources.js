// Lists the passages that an answer was given from: file, headings and score; a click opens the text.

import { byId, el } from "./dom.js";

/** @param documents of the answer. @param segments of its trace, which have the texts. */
export function showSources(documents, segments) {
  byId("sources-part").hidden = !documents.length;
  byId("sources").replaceChildren(...documents.map((source) => el("li", {}, card(source, segments))));
}

function card(source, segments) {
  const text = segments
    .filter((segment) => segment.document_id === source.id)
    .flatMap((segment) => segment.tokens)
    .join("");
  const where = source.path ? [source.title, source.heading].filter(Boolean).join(" \u203a ") : "";
  return el(
    "details",
    {},
    el(
      "summary",
      {},
      el("span", { class: "file" }, source.path ?? source.title ?? source.id ?? "passage"),
      where ? el("span", { class: "where" }, where.replaceAll(" > ", " \u203a ")) : "",
      typeof source.score === "number" ? el("span", { class: "score" }, `score ${shown(source.score)}`) : "",
    ),
    el("p", { class: "text", translate: "no" }, text.trim()),
  );
}

const shown = (score) => (score > 0 && score < 0.005 ? "< 0.01" : score.toFixed(2));

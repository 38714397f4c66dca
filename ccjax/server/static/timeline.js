// Shows where the time of a request went: phases, layers of the prefill, tokens, and a full prefill for comparison.

import { byId, el, percent, place, time } from "./dom.js";

const NAMES = {
  retrieval: "finding passages",
  preparation: "building the prompt",
  queue: "waiting in the queue",
  prefill: "prefill, with loads",
  decode: "decode",
};

export function showTimeline(trace) {
  const total = trace.total_s || 1e-9;
  byId("phases").replaceChildren(
    ...trace.phases.map((phase) => {
      const bar = el("i", { class: `phase ${phase.name}`, title: `${NAMES[phase.name]}: ${took(phase)}` });
      return place(bar, (100 * phase.start_s) / total, (100 * (phase.end_s - phase.start_s)) / total);
    }),
  );
  const table = byId("phase-table");
  table.tBodies[0].replaceChildren(
    ...trace.phases.map((phase) => {
      const name = el("th", { scope: "row" }, el("i", { class: `dot ${phase.name}` }), NAMES[phase.name]);
      const data = { "data-seconds": phase.end_s - phase.start_s };
      return el("tr", {}, name, el("td", {}, time(phase.start_s)), el("td", data, took(phase)));
    }),
  );
  const sum = el("td", { "data-seconds": trace.total_s }, time(trace.total_s));
  table.tFoot.replaceChildren(el("tr", {}, el("th", { scope: "row" }, "in all"), el("td"), sum));
  showLayers(trace);
  showTokens(trace);
}

const took = (span) => time(span.end_s - span.start_s);

function showLayers(trace) {
  const prefill = trace.phases.find((phase) => phase.name === "prefill");
  const start = Math.min(prefill.start_s, ...trace.loads.map((span) => span.start_s));
  const length = prefill.end_s - start || 1e-9;
  const rows = Array.from({ length: trace.num_layers }, (_, layer) => {
    const row = el("div", { class: "layer" });
    for (const [kind, spans] of [
      ["load", trace.loads],
      ["run", trace.layers],
    ]) {
      const lane = el("div", { class: "lane" });
      for (const span of spans.filter((one) => one.layer === layer)) {
        const bar = el("i", {
          class: kind,
          title: `layer ${layer}, ${kind === "load" ? "load" : "run"}: ${took(span)}`,
        });
        lane.append(place(bar, (100 * (span.start_s - start)) / length, (100 * (span.end_s - span.start_s)) / length));
      }
      row.append(lane);
    }
    return row;
  });
  byId("layers").replaceChildren(...rows);
  byId("layers-end").textContent = time(length);
  const ran = sum(trace.layers);
  const loads = trace.loads.length
    ? `loads took ${time(sum(trace.loads))}, during `
    : "nothing was loaded from host memory or disk; ";
  byId("layers-note").textContent =
    `One row for each of ${trace.num_layers} layers, from the start of the work to the first token: ${loads}` +
    `${time(ran)} of layers.` +
    (trace.compiled ? " A step ran at its size for the first time, and may have been compiled meanwhile." : "");
}

const sum = (spans) => spans.reduce((all, span) => all + span.end_s - span.start_s, 0);

function showTokens(trace) {
  const [first, last] = [trace.token_s[0], trace.token_s.at(-1)];
  const length = last - first || 1e-9;
  byId("decode").replaceChildren(...trace.token_s.map((at) => place(el("i"), (99.5 * (at - first)) / length, 0.5)));
  const number = trace.token_s.length;
  const each = number > 1 ? `, ${time((last - first) / (number - 1))} from one to the next` : "";
  byId("decode-note").textContent =
    `${number} ${number === 1 ? "token" : "tokens"}, the end of the turn included${each}.`;
}

/** Bars of the time to the first token. `measured` is the trace of the request with everything computed, or null. */
export function showCost(trace, measured) {
  const before = (one) => one.phases.find((phase) => phase.name === "prefill").start_s;
  const bars = [["this request", trace.ttft_s, before(trace), "this"]];
  if (measured) bars.push(["full prefill, measured", measured.ttft_s, before(measured), "full"]);
  else if (trace.full_prefill_ttft_s !== null) {
    bars.push(["full prefill, estimated", trace.full_prefill_ttft_s, before(trace), "full estimate"]);
  }
  const longest = Math.max(...bars.map(([, seconds]) => seconds));
  byId("cost").replaceChildren(
    ...bars.map(([name, seconds, waited, kind]) => {
      const fills = [el("i", { class: "before" }), el("i", { class: kind })];
      fills[0].style.width = `${(100 * waited) / longest}%`;
      fills[1].style.width = `${Math.max(0.5, (100 * (seconds - waited)) / longest)}%`;
      return el(
        "div",
        { class: "bar", "data-seconds": seconds },
        el("span", { class: "name" }, name),
        el("span", { class: "value" }, time(seconds)),
        el("div", { class: "track" }, ...fills),
      );
    }),
  );
  const note = byId("cost-note");
  if (measured) {
    note.textContent = compared(trace.ttft_s, measured.ttft_s);
    if (measured.compiled)
      note.textContent += " Full prefill may have waited for a step to be compiled: measure again.";
  } else if (trace.full_prefill_ttft_s === null) {
    note.textContent =
      "The time of a full prefill is unknown: none of about this length was run recently. The button below runs one.";
  } else {
    note.textContent =
      "Both from the arrival of the request. Full prefill is estimated from recent prefills of about this length; " +
      "the button below runs it.";
  }
  if (trace.compiled) note.textContent += " This request may have waited for a step to be compiled: ask again.";
}

function compared(own, full) {
  const ratio = full / own;
  if (ratio >= 1.05) return `With full prefill the first token took ${ratio.toFixed(1)} times as long.`;
  if (ratio <= 0.95) return `Full prefill took ${percent(ratio)} of the time: reuse gained nothing here.`;
  return "Both took about the same time.";
}

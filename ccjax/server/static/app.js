// The page: sends a question, shows the answer while it arrives, and then its trace.

import { chat, key, ServerError } from "./api.js";
import { byId, count, el, percent, time } from "./dom.js";
import { listProblems, watch } from "./live.js";
import { showPrompt } from "./prompt.js";
import { showSources } from "./sources.js";
import { showCost, showTimeline } from "./timeline.js";

const EXAMPLES = [
  "Which animal does Petra Dunn look after?",
  "What prize did Petra Dunn win?",
  "Where is the home of Petra Dunn?",
];
const RESULT_PANELS = ["cost-panel", "tokens-panel", "time-panel"];

let running = null; // AbortController of the request in progress
let last = null; // { body, text, trace } of the answer that is shown

// -- the server's state --------------------------------------------------------------------------------------

let wasDown = false;

const look = watch((state, text, numPassages) => {
  const status = byId("status");
  const shown = { ok: `ready: ${text}`, wait: text, down: "not reachable", key: text }[state];
  if (status.textContent !== shown) status.textContent = shown; // the same words again would be read out again
  status.dataset.state = state;
  if (state === "ok") {
    byId("examples").hidden = !numPassages || text !== "demo";
    byId("top-k-field").hidden = !numPassages;
    byId("documents-note").textContent = numPassages
      ? `The server adds passages of its documents, found among ${count(numPassages)}.`
      : "The server has no documents (--docs): the question is asked alone, or with passages of your own.";
    if (wasDown) showAlert("");
    wasDown = false;
  } else if (state === "down") {
    wasDown = true;
    showAlert("The server cannot be reached. The page tries again every two seconds.");
  }
});

function showAlert(text) {
  const alert = byId("alert");
  if (alert.textContent !== text) alert.textContent = text;
  alert.hidden = !text;
}

// -- asking --------------------------------------------------------------------------------------------------

function bodyOf(question) {
  const body = { messages: [{ role: "user", content: question }], trace: true };
  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
  if (byId("reuse").value) body.reuse = byId("reuse").value;
  if (number("max-tokens") !== null) body.max_tokens = number("max-tokens");
  const own = byId("own")
    .value.split(/\n\s*\n/)
    .map((text) => text.trim())
    .filter(Boolean);
  if (own.length) body.documents = own.map((text, at) => ({ text, id: `own-${at + 1}`, title: `Passage ${at + 1}` }));
  else if (!byId("top-k-field").hidden && number("top-k") !== null) body.retrieval = { top_k: number("top-k") };
  return body;
}

/** Sends a request; calls `onText` with the answer as it grows. Returns its text and its last chunk. */
async function run(body, onText) {
  running = new AbortController();
  setBusy(true);
  try {
    let text = "";
    let final = null;
    for await (const chunk of chat(body, running.signal)) {
      const more = chunk.choices?.[0]?.delta?.content;
      if (more) onText((text += more));
      if (chunk.reuse) final = chunk;
    }
    if (!final?.trace) throw new ServerError("The server sent no trace.");
    return { text, ...final };
  } finally {
    running = null;
    setBusy(false);
    look();
  }
}

function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("compare").disabled = isBusy;
  byId("stop").hidden = !isBusy;
  byId("answer-panel").toggleAttribute("data-busy", isBusy);
}

async function ask(question) {
  if (running || !question) return;
  const body = bodyOf(question);
  const answer = byId("answer");
  showAlert("");
  last = null;
  for (const id of RESULT_PANELS) byId(id).hidden = true;
  byId("answer-panel").hidden = false;
  byId("sources-part").hidden = true;
  byId("asked").textContent = question;
  byId("answer-note").textContent = "";
  byId("compare-note").textContent = "";
  answer.textContent = "";
  answer.setAttribute("aria-busy", "true"); // read out once it is whole, not piece by piece
  try {
    const told = await run(body, (grown) => (answer.textContent = grown.trimStart()));
    const { text, trace } = told;
    if (!text.trim()) answer.replaceChildren(el("em", {}, "The model's answer is empty."));
    last = { body, text, trace };
    show(told);
  } catch (error) {
    fail(error, "answer-note");
  } finally {
    answer.setAttribute("aria-busy", "false");
  }
}

function show({ reuse, trace, documents }) {
  for (const id of RESULT_PANELS) byId(id).hidden = false;
  byId("answer-note").textContent =
    `First token after ${time(trace.ttft_s)}; ` +
    `${count(reuse.reused_tokens)} of ${count(reuse.prompt_tokens)} prompt tokens ` +
    `(${percent(reuse.reused_tokens / reuse.prompt_tokens)}) reused` +
    (reuse.exact ? ", and the answer is the one of full prefill." : ", some of them approximately.");
  showSources(documents, trace.segments);
  showCost(trace, null);
  byId("compare").hidden = reuse.mode === "off";
  showPrompt(trace, reuse);
  showTimeline(trace);
}

/** Runs the displayed request once more, with everything computed. */
async function compare() {
  if (running || !last) return;
  const shown = last;
  const note = byId("compare-note");
  note.textContent = "Computing everything";
  try {
    const full = await run({ ...shown.body, reuse: "off" }, () => {});
    if (last !== shown) return;
    showCost(shown.trace, full.trace);
    const isSame = full.text === shown.text;
    note.textContent = isSame ? "Full prefill gives the same answer." : `Full prefill answers: ${full.text.trim()}`;
  } catch (error) {
    fail(error, "compare-note");
  }
}

function fail(error, where) {
  if (error.name === "AbortError") {
    byId(where).textContent = "Stopped.";
    return;
  }
  if (!(error instanceof ServerError)) console.error(error);
  if (error.status === 401) openKey();
  byId(where).textContent = "The answer is incomplete.";
  wasDown = error.status === 0;
  showAlert(error.message);
}

// -- key -----------------------------------------------------------------------------------------------------

const dialog = byId("key-dialog");

function openKey() {
  if (dialog.open) return;
  byId("key").value = key.get();
  dialog.showModal();
}

function useKey(value) {
  key.set(value);
  byId("key").value = "";
  dialog.close();
  showAlert("");
  look();
}

// -- wiring --------------------------------------------------------------------------------------------------

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(byId("question").value.trim());
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("compare").addEventListener("click", compare);
byId("problems").addEventListener("toggle", listProblems);
byId("key-open").addEventListener("click", openKey);
byId("key-clear").addEventListener("click", () => useKey(""));
byId("key-cancel").addEventListener("click", () => dialog.close());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
});
for (const text of EXAMPLES) {
  const button = el("button", { type: "button", class: "example" }, text);
  button.addEventListener("click", () => {
    byId("question").value = text;
    ask(text);
  });
  byId("examples").append(" ", button);
}

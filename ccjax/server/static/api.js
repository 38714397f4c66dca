// Calls of the server: JSON, event streams, and the key, which is kept in this tab only.

const KEY = "ccjax.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** A refusal of the server, or the reason why it could not be reached (`status` 0). */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (response.ok) return response;
  let told;
  try {
    told = (await response.json()).error?.message;
  } catch {
    /* no JSON: a proxy's page, say */
  }
  throw new ServerError(told ?? `The server answered ${response.status}.`, response.status);
}

export async function getJson(path, timeoutMs = 5000) {
  try {
    return await (await send(path, { signal: AbortSignal.timeout(timeoutMs) })).json();
  } catch (error) {
    if (error instanceof ServerError) throw error;
    throw new ServerError("The server does not answer.");
  }
}

/** The chunks of a streamed chat, as they arrive. Throws ServerError; an AbortError if `signal` ended it. */
export async function* chat(body, signal) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  let isDone = false;
  for await (const data of events(response.body, signal)) {
    if (data === "[DONE]") {
      isDone = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The answer failed.", chunk.error.status ?? 500);
    yield chunk;
  }
  if (!isDone) throw new ServerError("The connection was lost in the middle of the answer.");
}

async function* events(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw new DOMException("stopped", "AbortError");
        throw new ServerError("The connection was lost in the middle of the answer.");
      }
      if (piece.done) return;
      const lines = (rest + piece.value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

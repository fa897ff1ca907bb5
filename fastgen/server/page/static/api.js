// Talking to the server: JSON and server-sent events through fetch, which can bear the key (EventSource cannot).

import { loadKey } from "./store.js";

let key = loadKey();

export const hasKey = () => key !== "";
export const useKey = (given) => (key = given);

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A response with a good status. */
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  throw new ServerError(response.status, await problem(response));
}

async function problem(response) {
  let said = "";
  try {
    said = (await response.json()).error.message;
  } catch {
    // not ours, a proxy's perhaps
  }
  const wait = response.headers.get("retry-after");
  const hint = response.status === 429 && wait ? ` Try again in ${wait} s.` : "";
  return typeof said === "string" && said ? said + hint : `The server answered ${response.status}.${hint}`;
}

export async function about() {
  return (await ask("/page/about")).json();
}

/** Names that clients may use for the model. */
export async function models() {
  const { data } = await (await ask("/v1/models")).json();
  return data.map((model) => String(model.id));
}

/** Events of `{event, data}` as they come, until the stream ends or `signal` says so. */
async function* events(path, options) {
  const response = await ask(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const event = { event: "message", data: "" };
        for (const line of block.split(/\r?\n/)) {
          if (line.startsWith("event:")) event.event = line.slice(6).trim();
          if (line.startsWith("data:")) event.data += line.slice(5).trimStart();
        }
        if (event.data) yield event;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The connection to the server broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Pieces of an answer: `{text}`, `{reason}` and `{usage}`. */
export async function* chat(body, signal) {
  const request = {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  };
  let ended = false;
  for await (const { data } of events("/v1/chat/completions", request)) {
    if (data === "[DONE]") return;
    const piece = JSON.parse(data);
    if (piece.error) throw new ServerError(500, String(piece.error.message));
    if (piece.usage) yield { usage: piece.usage };
    const choice = piece.choices?.[0];
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) {
      ended = true;
      yield { reason: choice.finish_reason };
    }
  }
  if (!ended) throw new ServerError(0, "The answer broke off.");
}

/** Snapshots for the live view: `[kind, content]`. */
export async function* live(signal) {
  for await (const { event, data } of events("/live", { signal })) yield [event, JSON.parse(data)];
}

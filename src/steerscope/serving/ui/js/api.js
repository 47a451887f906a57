// Requests to the server, its errors, and streams of events.
import { stored } from "./state.js";

let key = stored(() => sessionStorage.getItem("steerscope.key")) ?? "";
export function setKey(value) {
  key = value;
  stored(() => sessionStorage.setItem("steerscope.key", value));
}

export class Refused extends Error {
  constructor(status, body, retryAfter) {
    const error = body?.error ?? {};
    super(error.message ?? `The server answered ${status}.`);
    this.status = status;
    this.problems = body?.problems ?? error.problems ?? [];
    this.retryAfter = retryAfter;
  }
}
export class Unreachable extends Error {}

/** Wait for the network; its errors become `Unreachable`. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Unreachable("The server cannot be reached.");
  }
}

/** Addresses are relative to the page, so that it also works behind a prefix. */
export async function ask(path, { json, accept = [], ...options } = {}) {
  const headers = new Headers(key ? { authorization: `Bearer ${key}` } : {});
  if (json) {
    headers.set("content-type", "application/json");
    options.body = JSON.stringify(json);
  }
  const answer = await reached(fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" }));
  if (answer.ok || accept.includes(answer.status)) return answer;
  const told = await answer.json().catch(() => null);
  throw new Refused(answer.status, told, Number(answer.headers.get("retry-after")) || null);
}
export const get = async (path) => (await ask(path)).json();

/** The data of each server-sent event, parsed; ends at [DONE]. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reached(reader.read());
    if (done) throw new Unreachable("The connection was closed before the answer was whole.");
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

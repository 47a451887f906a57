// Requests to the server, its errors, and streams of events.

let key = "";
try {
  key = sessionStorage.getItem("steerscope.key") ?? "";
} catch {
  // No storage: the key is asked for again after a reload.
}
export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem("steerscope.key", value);
  } catch {
    // As above.
  }
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
export class Unreachable extends Error {
  constructor(what = "The server cannot be reached.") {
    super(what);
  }
}

/** Addresses are relative to the page, so that it also works behind a prefix. */
export async function ask(path, { method = "GET", json, body, signal, accept = [] } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (json !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    const sent = json === undefined ? body : JSON.stringify(json);
    answer = await fetch(new URL(path, document.baseURI), { method, headers, body: sent, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable();
  }
  if (!answer.ok && !accept.includes(answer.status)) {
    const told = await answer.json().catch(() => null);
    throw new Refused(answer.status, told, Number(answer.headers.get("retry-after")) || null);
  }
  return answer;
}
export const get = async (path, options) => (await ask(path, options)).json();

/** The data of each server-sent event, parsed; ends at [DONE]. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Unreachable();
    }
    if (read.done) throw new Unreachable("The connection was closed before the answer was whole.");
    const parts = (rest + read.value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trim())
        .join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

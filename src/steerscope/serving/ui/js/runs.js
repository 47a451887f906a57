// Turns and runs: requests to the model, and their answers, token by token.
import { ask, events, Refused } from "./api.js";
import { allRuns, concept, emit, keepConversation, settings, state } from "./state.js";
import { measured, steering } from "./vectors.js";

let count = 0;
const unique = (kind) => `${kind}${Date.now().toString(36)}${(count += 1).toString(36)}`;

function newRun(side, steer) {
  return {
    id: unique("r"),
    side, // "A" steered, "B" unsteered, null alone
    steer,
    abort: new AbortController(), // until it ends
    status: "waiting", // waiting, writing, done, stopped, failed
    error: null,
    finish: null,
    text: "",
    tokens: [], // text of each
    ids: [],
    top: [], // per token: [concept, score, concept, score, …], best first
    firings: [], // {name, action, at, position, score}
    projections: {}, // vector → layer → one number per token
    prompt: null,
    said: null, // its message, with tokens, readings and projections like an answer's
    capture: null,
    usage: null,
    first: null,
    last: null,
  };
}

/** The message as the model saw it. `prompt` is the position of its first token, as for an answer. */
function newSaid(run, tokens) {
  const empty = { side: null, status: "done", finish: null, firings: [], top: [], projections: {} };
  const own = { id: `${run.id}-said`, message: true, prompt: tokens[0].position };
  return { ...empty, ...own, tokens: tokens.map((one) => one.t), ids: tokens.map((one) => one.id) };
}

/** Send a message. With `compare` it is answered twice, with the steering and without. */
export function send(text, { compare = settings.compare, turn = null } = {}) {
  const steer = steering();
  const runs = compare ? [newRun("A", steer), newRun("B", [])] : [newRun(null, steer)];
  if (turn) Object.assign(turn, { runs, chosen: 0 });
  else state.turns.push((turn = { id: unique("t"), user: text, runs, chosen: 0 }));
  state.shownTurn = null;
  state.pinned = null;
  const asked = { messages: history(turn), ...sampling() };
  emit("turns", turn);
  for (const run of runs) follow(run, asked);
}

export function stopAll() {
  for (const run of allRuns()) run.abort?.abort();
}

function history(until) {
  const messages = settings.system.trim() ? [{ role: "system", content: settings.system.trim() }] : [];
  for (const turn of state.turns) {
    messages.push({ role: "user", content: turn.user });
    if (turn === until) break;
    messages.push({ role: "assistant", content: turn.runs[turn.chosen].text });
  }
  return messages;
}

function sampling() {
  const { temperature, topP, maxTokens, seed, penalty } = settings;
  const most = { max_completion_tokens: maxTokens, temperature, seed };
  return { ...most, ...(topP < 1 && { top_p: topP }), ...(penalty > 1 && { repetition_penalty: penalty }) };
}

/** The `steerscope` object of a request. */
function extras(run, messages) {
  const extra = {};
  const message = state.facts?.messages ? `message=${messages.length - 1}` : null;
  // An unsteered answer is also free of the server's default steering.
  if (run.side === "B") extra.steer = { ops: [], reset: true };
  else if (run.steer.length) extra.steer = run.steer;
  if (settings.pack) {
    if (settings.rules.length && run.side !== "B") extra.rules = settings.rules;
    // Rules act on every reading: with them, only the answer is read.
    const tokens = message && !extra.rules ? `generated | ${message}` : "generated";
    extra.watch = { pack: settings.pack, top_k: settings.topK, tokens };
  }
  const project = measured();
  if (project.length) extra.project = project;
  if (message && (extra.watch || extra.project)) extra.prompt = message;
  if (settings.capture) extra.capture = { layers: settings.captureLayers.trim() || "all" };
  return extra;
}

async function follow(run, asked) {
  state.running += 1;
  emit("running");
  try {
    const stream = { stream: true, stream_options: { include_usage: true } };
    const json = { ...asked, ...stream, model: state.facts?.model, steerscope: extras(run, asked.messages) };
    const answer = await ask("v1/chat/completions", { method: "POST", json, signal: run.abort.signal });
    for await (const chunk of events(answer)) {
      if (chunk.error) throw new Refused(chunk.error.status ?? 500, chunk);
      absorb(run, chunk);
      emit("run", run);
    }
    run.status = "done";
  } catch (error) {
    if (error.name === "AbortError") run.status = "stopped";
    else fail(run, error);
  }
  delete run.abort;
  state.running -= 1;
  emit("run", run);
  emit("run-end", run);
  emit("running");
  keepConversation();
}

function fail(run, { message, status = null, problems = [], retryAfter = null }) {
  run.status = "failed";
  run.error = { message, status, problems, retryAfter };
  if (!status || status >= 500) emit("lost");
}

function absorb(run, chunk) {
  if (chunk.usage) run.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  const extra = chunk.steerscope ?? choice?.steerscope ?? {};
  addText(run, choice?.delta?.content ?? "", extra.tokens);
  if (extra.prompt?.length) run.said = newSaid(run, extra.prompt);
  for (const reading of extra.readings ?? []) addReading(run, reading);
  for (const fired of extra.rules ?? []) run.firings.push(firing(run, fired));
  for (const [vector, layers] of Object.entries(extra.projections ?? {}))
    run.projections[vector] = { ...run.projections[vector], ...layers };
  if (run.said) Object.assign(run.said.projections, extra.prompt_projections);
  if (extra.captures) run.capture = extra.captures;
  if (choice?.finish_reason) run.finish = extra.finish?.reason ?? choice.finish_reason;
}

/** Add text, whose tokens the server names where it can. */
function addText(run, text, tokens = []) {
  run.text += text;
  const whole = text ? [{ t: text }] : [];
  for (const token of tokens.length ? tokens : whole) {
    run.tokens.push(token.t ?? "");
    run.ids.push(token.id ?? null);
  }
  if (!run.tokens.length) return;
  run.status = "writing";
  run.last = performance.now();
  run.first ??= run.last;
}

function addReading(run, { token_index: at, position, top }) {
  const flat = top.flatMap((one) => [concept(one.id, one.name, one.path), one.score]);
  if (at >= 0 && at !== null) {
    run.prompt ??= position - at;
    run.top[at] = flat;
  } else if (run.said) run.said.top[position - run.said.prompt] = flat;
}

function firing(run, { name, action, position, token_index: index, score = null }) {
  // A rule fires on a row; the number it carries is that of the token it came with, which is the next one.
  const at = run.prompt === null ? (index ?? 1) - 1 : position - run.prompt;
  return { name, action, position, at: Math.max(0, at), score };
}

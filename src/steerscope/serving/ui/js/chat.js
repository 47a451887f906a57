// The conversation. New tokens are appended and tinted once per animation frame.
import { $, bytes, fill, h, icon, iconButton, plural, soon, work } from "./dom.js";
import { emit, keepConversation, on, settings, state } from "./state.js";
import { paint } from "./tint.js";
import { opChip } from "./vectors.js";
import { send } from "./runs.js";
import { saveCapture } from "./exporting.js";

const views = new Map(); // id of an answer or a message → its view
const touched = new Set(); // runs that changed since the last frame
const seed = h("span.t");
let log;
let stuck = true; // the log follows what is written

export function setUpChat() {
  log = $("#log");
  log.addEventListener("scroll", () => {
    stuck = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  });
  on("turns", rebuild);
  on("run run-end", (run) => {
    touched.add(run);
    soon(draw);
  });
  on("tint", () => soon(repaint));
  on("connection vectors lenses", () => {
    if (!state.turns.length) soon(rebuildAll);
  });
  rebuildAll();
}

export const view = (run) => views.get(run.id);
export const spanOf = (run, i) => views.get(run.id)?.spans[i];

/** Show the last turn anew, or all. */
function rebuild(turn) {
  const old = turn && $(`[data-turn="${turn.id}"]`, log);
  if (!turn || state.turns.at(-1) !== turn || (!old && state.turns.length === 1)) return rebuildAll();
  const made = turnView(turn);
  if (old) old.replaceWith(made);
  else log.append(made);
  stuck = true;
  soon(draw);
}

function rebuildAll() {
  views.clear();
  fill(log, state.turns.length ? state.turns.map(turnView) : blank());
  stuck = true;
  draw();
}

const LEAD =
  "Every token of the answer is coloured by what lenses read in the model while it was written. " +
  "Point at a token for all its readings; move a slider and ask again to see what changes.";
const NO_LENSES = "No lens pack is loaded, so no concepts are read: start the server with --pack PACK.";
const NO_VECTORS = "There are no vectors: drop a file on the panel, or start the server with --vectors DIR.";
const TRIES = [
  "How was your day?",
  "Tell me a story about a lighthouse in a storm.",
  "What should I cook on a cold evening?",
];

/** The page before the first message. */
function blank() {
  const ready = state.connection === "ready";
  const note = (known, text) => ready && !known.length && h("p.server-note", text);
  const tries = TRIES.map((text) => h("button", { disabled: !ready, onclick: () => send(text) }, text));
  const notes = [note(state.lenses, NO_LENSES), note(state.vectors, NO_VECTORS)];
  return h("div.blank", h("h2", "Watch a model think, and steer it"), h("p", LEAD), ...notes, h("div.tries", tries));
}

function turnView(turn) {
  const pair = turn.runs.length > 1;
  const answers = turn.runs.map((run) => runView(turn, run, pair));
  for (const run of turn.runs) touched.add(run);
  const row = (who, content) => h("div.row", h("div.who", who), content);
  return h(
    "article.turn",
    { "data-turn": turn.id },
    row("You", h("div.said", turn.user)),
    row("Model", h(`div.answers${pair ? ".pair" : ""}`, answers)),
  );
}

/** The tokens of an answer or of a message, and how far they are drawn. */
function tokensView(run, turn, label) {
  const about = { tabindex: 0, role: "group", "aria-label": `${label}: arrow keys go through its tokens` };
  const tokens = h("div.tokens", { ...about, "data-run": run.id });
  const made = { run, turn, tokens, line: null, spans: [], painted: 0 };
  views.set(run.id, made);
  return made;
}

function runView(turn, run, pair) {
  const made = Object.assign(tokensView(run, turn, "Answer"), {
    marked: 0,
    shownStatus: null,
    caret: h("span.caret", { "aria-hidden": "true" }),
    wait: h("div.waiting", "Waiting for the first token"),
    fires: h("div.fires", { hidden: true }),
    chips: new Map(),
    counts: h("span"),
    note: h("div"),
  });
  made.tokens.append(made.wait);
  made.foot = h("div.foot", made.counts);
  const parts = [head(turn, run, pair), made.tokens, made.note, made.fires, made.foot];
  return h("section.answer", { "data-run": run.id }, parts);
}

function head(turn, run, pair) {
  const chips = run.steer.map(opChip);
  if (run.side === "A" && !chips.length) chips.push(h("span.chip.plain-chip", "no vector is switched on"));
  if (!pair) return h("div.answer-head", chips);
  const onchange = () => {
    turn.chosen = turn.runs.indexOf(run);
    keepConversation();
  };
  const checked = turn.runs[turn.chosen] === run;
  const keep = h("input", { type: "radio", name: `keep-${turn.id}`, checked, onchange });
  const title = "The next message continues from this answer";
  return h(
    "div.answer-head",
    h("span.side", `${run.side} · ${run.side === "A" ? "Steered" : "Unsteered"}`),
    chips,
    h("label.keep", { title }, keep, "continue"),
  );
}

// --- drawing

function draw() {
  for (const run of touched) if (view(run)) drawRun(view(run));
  touched.clear();
  if (stuck) log.scrollTop = log.scrollHeight;
}

function drawRun(made) {
  const { run } = made;
  if (run.tokens.length) made.wait.remove();
  append(made);
  tintNew(made);
  drawSaid(made);
  for (; made.marked < run.firings.length; made.marked += 1) mark(made, run.firings[made.marked]);
  if (run.status === "writing") (made.line ?? made.tokens).append(made.caret);
  const counts = facts(run);
  if (made.counts.textContent !== counts) made.counts.textContent = counts;
  if (made.shownStatus !== run.status) ended(made);
}

/** The message, token by token once the server has sent them; of two answers the first one's readings are shown. */
function drawSaid({ run, turn }) {
  const said = run.said;
  if (!said || turn.runs[0] !== run) return;
  const made = view(said) ?? tokensView(said, turn, "Your message");
  append(made);
  if (!made.tokens.isConnected) fill($(`[data-turn="${turn.id}"] .said`, log), made.tokens);
  tintNew(made);
}

function append(made) {
  const { run, spans } = made;
  const lines = []; // new ones
  for (let i = spans.length; i < run.tokens.length; i += 1) {
    if (!made.line) lines.push((made.line = h("div.line")));
    const span = seed.cloneNode(false);
    span.at = i;
    // A leading space stays outside: where the line breaks it would hang over as a coloured sliver.
    const text = run.tokens[i];
    const lead = text.length > 1 && text[0] === " ";
    if (lead) made.line.append(" ");
    span.textContent = lead ? text.slice(1) : text;
    made.line.append(span);
    spans.push(span);
    work.spans += 1;
    // A line of its own for each line of text, so that a new token only lays out the last one.
    if (text.endsWith("\n")) made.line = null;
  }
  made.tokens.append(...lines);
}

function tintNew(made) {
  const { run, spans } = made;
  const known = settings.tint.kind === "vector" ? spans.length : Math.min(run.top.length, spans.length);
  for (; made.painted < known; made.painted += 1) tint(made, made.painted);
}

function tint(made, i) {
  const { v, tone } = paint(made.run, i);
  const span = made.spans[i];
  const value = v < 0.02 ? "0" : v.toFixed(2);
  if (span.tone === tone && span.value === value) return;
  if (span.value === undefined && value === "0") return;
  Object.assign(span, { tone, value });
  span.style.setProperty("--v", value);
  span.style.setProperty("--tone", tone);
  work.tints += 1;
}

function repaint() {
  for (const made of views.values()) {
    made.spans.forEach((_, i) => tint(made, i));
    made.painted = Math.min(made.run.top.length, made.spans.length);
  }
}

const DID = { flag: "marked", stop: "ended the answer", steer: "steered" };

/** Underline the token, and count it on the rule's chip. Only the heat map shows when a vector is switched off again. */
function mark(made, { name, action, at }) {
  if (action.endsWith("_off")) return;
  made.spans[Math.min(at, made.spans.length - 1)]?.classList.add("fired");
  made.fires.hidden = false;
  let chip = made.chips.get(name);
  if (!chip) {
    chip = h("button.fire", { title: "Go to the next token where it fired" }, icon("flag"), h("span"));
    Object.assign(chip, { ats: [], next: 0 });
    made.chips.set(name, chip);
    made.fires.append(chip);
  }
  chip.ats.push(at);
  const n = chip.ats.length;
  chip.lastChild.textContent = `${name} ${DID[action] ?? action} ${n === 1 ? `at token ${at}` : `${n} times`}`;
}

function ended(made) {
  const { run, turn } = made;
  made.shownStatus = run.status;
  if (run.abort) return;
  made.caret.remove();
  made.wait.remove();
  if (run.status === "stopped" && !run.tokens.length)
    made.tokens.append(h("div.waiting", "Stopped before the first token"));
  if (run.status === "failed") fill(made.note, problem(run, turn));
  made.tokens.hidden = run.status === "failed" && !run.tokens.length;
  const copy = iconButton("copy", "Copy the text", () => navigator.clipboard?.writeText(run.text));
  // Only the last message can be answered again: the style sheet hides the button of those before it.
  const again = iconButton("again", "Answer again with the current steering (Ctrl+Enter)", () => emit("again"));
  again.classList.add("again");
  const tools = h("span.tools", run.text && copy, run === turn.runs.at(-1) && again);
  fill(made.foot, made.counts, run.capture && captureButton(run), h("span.gap"), tools);
}

function captureButton(run) {
  const about = { title: "Download these activations (safetensors)", onclick: () => saveCapture(run) };
  return h("button.quiet.get", about, icon("down"), `${run.capture.rows} rows · ${bytes(run.capture.bytes ?? 0)}`);
}

const ENDS = {
  stop: "ended by itself",
  stop_string: "stop string",
  length: "cut at the limit",
  rule: "ended by a rule",
};

/** "24 tokens · 12.3/s · cut at the limit" */
function facts(run) {
  const n = run.tokens.length;
  if (!n) return "";
  const seconds = (run.last - run.first) / 1000;
  const speed = n > 1 && seconds > 0 && `${((n - 1) / seconds).toFixed(1)}/s`;
  const end = { done: ENDS[run.finish] ?? run.finish ?? "done", stopped: "stopped" }[run.status];
  return [plural(n, "token"), speed, end].filter(Boolean).join(" · ");
}

function problem(run, turn) {
  const { message, problems, status, retryAfter } = run.error;
  const list = problems.map((one) =>
    h("li", h("code", one.param ?? ""), ` ${one.message}`, one.remedy && `: ${one.remedy}`),
  );
  let title = list.length ? "The server refused this:" : message;
  if (status === 429) title = `The server is full${retryAfter ? `; try again in ${retryAfter} s` : ""}.`;
  const again = () => send(turn.user, { turn, compare: turn.runs.length > 1 });
  return h(
    "div.problem",
    { role: "alert" },
    h("b", title),
    list.length > 0 && h("ul", list),
    h("div", h("button.plain", { onclick: again }, "Try again")),
  );
}

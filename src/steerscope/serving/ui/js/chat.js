// The conversation. New tokens are appended and tinted once per animation frame.
import { $, bytes, fill, h, icon, iconButton, soon, work } from "./dom.js";
import { emit, keepConversation, on, settings, state } from "./state.js";
import { paint } from "./tint.js";
import { opText, opTextLong } from "./steering.js";
import { send } from "./runs.js";
import { saveCapture } from "./exporting.js";

const views = new Map(); // run id → its view
const touched = new Set(); // runs that changed since the last frame
let log;
let stuck = true; // the log follows what is written
const seed = h("span.t");

export function setUpChat() {
  log = $("#log");
  log.addEventListener(
    "scroll",
    () => {
      stuck = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
    },
    { passive: true },
  );
  on("turns", rebuild);
  on("run run-end", (run) => {
    touched.add(run);
    soon(draw);
  });
  on("tint", () => soon(repaint));
  on("connection vectors lenses", () => {
    if (!state.turns.length) soon(rebuildNow);
  });
  rebuildNow();
}

export const view = (run) => views.get(run.id);
export const spanOf = (run, i) => views.get(run.id)?.spans[i];

function rebuild(turn) {
  const old = turn && log.querySelector(`[data-turn="${turn.id}"]`);
  if (turn && state.turns.at(-1) === turn && (old || state.turns.length > 1)) {
    const made = turnView(turn);
    if (old) old.replaceWith(made);
    else log.append(made);
    stuck = true;
    soon(draw);
  } else rebuildNow();
}

function rebuildNow() {
  views.clear();
  fill(log, state.turns.length ? state.turns.map(turnView) : blank());
  stuck = true;
  draw();
}

const TRIES = [
  "How was your day?",
  "Tell me a story about a lighthouse in a storm.",
  "What should I cook on a cold evening?",
];

/** The page before the first message. */
function blank() {
  const ready = state.connection === "ready";
  const note = (missing, text) => ready && missing && h("p.server-note", text);
  const lead =
    "Every token of the answer is coloured by what lenses read in the model while it was written. " +
    "Point at a token for all its readings; move a slider and ask again to see what changes.";
  return h(
    "div.blank",
    h("h2", "Watch a model think, and steer it"),
    h("p", lead),
    note(!state.lenses.length, "No lens pack is loaded, so no concepts are read: start the server with --pack PACK."),
    note(
      !state.vectors.length,
      "There are no vectors: drop a file on the panel, or start the server with --vectors DIR.",
    ),
    h(
      "div.tries",
      TRIES.map((text) => h("button", { disabled: !ready, onclick: () => send(text) }, text)),
    ),
  );
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
  const kept = pair && turn.runs[turn.chosen] === run;
  const about = { "data-run": run.id };
  const parts = [head(turn, run, pair), made.tokens, made.note, made.fires, made.foot];
  made.root = h(`section.answer${kept ? ".kept" : ""}`, about, parts);
  return made.root;
}

function head(turn, run, pair) {
  const chips = run.steer.map((op) => h("span.chip", { title: opTextLong(op) }, opText(op)));
  if (run.side === "A" && !chips.length) chips.push(h("span.chip.plain-chip", "no vector is switched on"));
  if (!pair) return h("div.answer-head", chips);
  const keep = h("input", {
    type: "radio",
    name: `keep-${turn.id}`,
    checked: turn.runs[turn.chosen] === run,
    onchange: () => {
      turn.chosen = turn.runs.indexOf(run);
      for (const one of turn.runs) view(one).root.classList.toggle("kept", one === run);
      keepConversation();
    },
  });
  const title = "The next message continues from this answer";
  return h(
    "div.answer-head",
    h("span.side", `${run.side} · ${run.side === "A" ? "Steered" : "Unsteered"}`),
    chips,
    h("label.keep", { title }, keep, "continue"),
  );
}

/** The message, token by token once the server has sent them; of two answers the first one's readings are shown. */
function drawSaid({ run, turn }) {
  const said = run.said;
  if (!said || turn.runs[0] !== run) return;
  let made = views.get(said.id);
  if (!made) {
    made = tokensView(said, turn, "Your message");
    append(made);
    const box = $(`[data-turn="${turn.id}"] .said`, log);
    if (box) fill(box, made.tokens);
  }
  tintNew(made);
}

// --- drawing

function draw() {
  for (const run of touched) {
    const made = views.get(run.id);
    if (made) drawRun(made);
  }
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

function append(made) {
  const { run, spans } = made;
  let fresh = null;
  for (let i = spans.length; i < run.tokens.length; i += 1) {
    if (!made.line) {
      made.line = h("div.line");
      (fresh ??= document.createDocumentFragment()).append(made.line);
    }
    const span = seed.cloneNode(false);
    span.at = i;
    // A leading space stays outside: where the line breaks it would hang over as a coloured sliver.
    const text = run.tokens[i];
    const lead = text.length > 1 && text[0] === " " ? 1 : 0;
    span.textContent = lead ? text.slice(1) : text;
    if (lead) made.line.append(" ", span);
    else made.line.append(span);
    spans.push(span);
    work.spans += 1;
    // A line of its own for each line of text, so that a new token only lays out the last one.
    if (run.tokens[i].endsWith("\n")) made.line = null;
  }
  if (fresh) made.tokens.append(fresh);
}

function tintNew(made) {
  const { run, spans } = made;
  const known = settings.tint.kind === "vector" ? run.tokens.length : Math.min(run.top.length, spans.length);
  for (; made.painted < known; made.painted += 1) tint(made, made.painted);
}

function tint(made, i) {
  const { v, tone } = paint(made.run, i);
  const span = made.spans[i];
  const value = v < 0.02 ? "0" : v.toFixed(2);
  if (span.tone === tone && span.value === value) return;
  if (span.value === undefined && value === "0") return;
  span.tone = tone;
  span.value = value;
  span.style.setProperty("--v", value);
  span.style.setProperty("--tone", tone);
  work.tints += 1;
}

function repaint() {
  for (const made of views.values()) {
    for (let i = 0; i < made.spans.length; i += 1) tint(made, i);
    made.painted = Math.min(made.run.top.length, made.spans.length);
  }
}

/** Underline the token, and count it on the rule's chip. Only the heat map shows when a vector is switched off again. */
function mark(made, fired) {
  if (fired.action.endsWith("_off")) return;
  made.spans[Math.min(fired.at, made.spans.length - 1)]?.classList.add("fired");
  made.fires.hidden = false;
  let chip = made.chips.get(fired.name);
  if (!chip) {
    chip = h("button.fire", { title: "Go to the next token where it fired" }, icon("flag"), h("span"));
    Object.assign(chip, { ats: [], next: 0 });
    made.chips.set(fired.name, chip);
    made.fires.append(chip);
  }
  chip.ats.push(fired.at);
  const n = chip.ats.length;
  const did = { flag: "marked", stop: "ended the answer", steer: "steered" }[fired.action] ?? fired.action;
  chip.lastChild.textContent = `${fired.name} ${did} ${n === 1 ? `at token ${fired.at}` : `${n} times`}`;
}

function ended(made) {
  const { run, turn } = made;
  made.shownStatus = run.status;
  if (run.status === "waiting" || run.status === "writing") return;
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
  const parts = [`${n} ${n === 1 ? "token" : "tokens"}`];
  const seconds = (run.last - run.first) / 1000;
  if (n > 1 && seconds > 0) parts.push(`${((n - 1) / seconds).toFixed(1)}/s`);
  if (run.status === "stopped") parts.push("stopped");
  if (run.status === "done") parts.push(ENDS[run.finish] ?? run.finish ?? "done");
  return parts.join(" · ");
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

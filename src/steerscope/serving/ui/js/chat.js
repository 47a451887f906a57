// The conversation. Tokens are appended and tinted once per animation frame, whatever arrived since the last one.
import { $, bytes, h, icon, iconButton, soon, work } from "./dom.js";
import { emit, keepConversation, on, settings, state } from "./state.js";
import { paint } from "./tint.js";
import { told, toldLong } from "./steering.js";
import { facts, problem } from "./endings.js";
import { saveCapture } from "./exporting.js";
import { blank } from "./blank.js";

const views = new Map(); // run id → what shows it
const touched = new Set(); // runs that changed since the last frame
let log,
  stuck = true;
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
  log.replaceChildren(...(state.turns.length ? state.turns.map(turnView) : [blank()]));
  stuck = true;
  for (const turn of state.turns) for (const run of turn.runs) touched.add(run);
  draw();
}

function turnView(turn) {
  const pair = turn.runs.length > 1;
  const answers = h(
    `div.answers${pair ? ".pair" : ""}`,
    {},
    turn.runs.map((run) => runView(turn, run, pair)),
  );
  for (const run of turn.runs) touched.add(run);
  return h(
    "article.turn",
    { "data-turn": turn.id },
    h("div.row", {}, h("div.who", {}, "You"), h("div.said", {}, turn.user)),
    h("div.row", {}, h("div.who", {}, "Model"), answers),
  );
}

function runView(turn, run, pair) {
  const tokens = h("div.tokens", {
    tabindex: 0,
    role: "group",
    "aria-label": "Answer: arrow keys go through its tokens",
    "data-run": run.id,
  });
  const made = {
    run,
    turn,
    tokens,
    line: null,
    spans: [],
    painted: 0,
    marked: 0,
    shownStatus: null,
    caret: h("span.caret", { "aria-hidden": "true" }),
    wait: h("div.waiting", {}, "Waiting for the first token"),
    fires: h("div.fires", { hidden: true }),
    chips: new Map(),
    foot: h("div.foot"),
    counts: h("span"),
    note: h("div"),
  };
  tokens.append(made.wait);
  made.foot.append(made.counts);
  views.set(run.id, made);
  made.root = h(
    `section.answer${pair && turn.runs[turn.chosen] === run ? ".kept" : ""}`,
    { "data-run": run.id },
    head(turn, run, pair),
    tokens,
    made.note,
    made.fires,
    made.foot,
  );
  return made.root;
}

function head(turn, run, pair) {
  const chips = run.steer.map((op) => h("span.chip", { title: toldLong(op) }, told(op)));
  if (run.side === "A" && !chips.length) chips.push(h("span.chip.plain-chip", {}, "nothing is switched on"));
  if (!pair) return h("div.answer-head", {}, chips);
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
  const name = run.side === "A" ? "Steered" : "Unsteered";
  return h(
    "div.answer-head",
    {},
    h("span.side", {}, `${run.side} · ${name}`),
    chips,
    h("label.keep", { title: "The next message goes on from this answer" }, keep, "continue"),
  );
}

/** The message, token by token once the server has told them; of two answers the first one's readings are shown. */
function drawSaid({ run, turn }) {
  const said = run.said;
  if (!said || turn.runs[0] !== run) return;
  let made = views.get(said.id);
  if (!made) {
    const label = "Your message: arrow keys go through its tokens";
    const tokens = h("div.tokens", { tabindex: 0, role: "group", "aria-label": label, "data-run": said.id });
    views.set(said.id, (made = { run: said, turn, tokens, line: null, spans: [], painted: 0 }));
    append(made);
    log.querySelector(`[data-turn="${turn.id}"] .said`)?.replaceChildren(tokens);
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
  if (run.tokens.length && made.wait) {
    made.wait.remove();
    made.wait = null;
  }
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

/** Underline the token, and count it on the rule's chip. That a vector went off again is only in the heat map. */
function mark(made, fired) {
  if (fired.action.endsWith("_off")) return;
  made.spans[Math.min(fired.at, made.spans.length - 1)]?.classList.add("fired");
  made.fires.hidden = false;
  let chip = made.chips.get(fired.name);
  if (!chip) {
    chip = h("button.fire", { type: "button", title: "Go to the next token where it fired" }, icon("flag"), h("span"));
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
  if (made.wait) {
    made.wait.remove();
    made.wait = null;
  }
  if (run.status === "stopped" && !run.tokens.length)
    made.tokens.append(h("div.waiting", {}, "Stopped before the first token"));
  if (run.status === "failed") made.note.replaceChildren(problem(run, turn));
  made.tokens.hidden = run.status === "failed" && !run.tokens.length;
  const parts = [made.counts];
  if (run.capture) {
    const what = `${run.capture.rows} rows · ${bytes(run.capture.bytes ?? 0)}`;
    parts.push(
      h(
        "button.quiet.get",
        { type: "button", title: "Download these activations (safetensors)", onclick: () => saveCapture(run) },
        icon("down"),
        what,
      ),
    );
  }
  const tools = h(
    "span.tools",
    {},
    run.text ? iconButton("copy", "Copy the text", () => navigator.clipboard?.writeText(run.text)) : null,
  );
  // Only the last message can be answered again: the style sheet hides the button of those before it.
  if (run === turn.runs.at(-1)) {
    const again = iconButton("again", "Answer again with the present steering (Ctrl+Enter)", () => emit("again"));
    again.classList.add("again");
    tools.append(again);
  }
  made.foot.replaceChildren(...parts, h("span.gap"), tools);
}

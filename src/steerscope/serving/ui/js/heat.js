// Concepts over tokens: a row for each concept, a canvas for each answer of a turn. Only the visible columns are drawn, so
// the cost does not grow with the text.
import { $, clamp, colour, fill, h, iconButton, say, set, shown, soon, work } from "./dom.js";
import { change, chosenPack, conceptIndex, on, readings, score, settings, state } from "./state.js";
import { segments } from "./controls.js";
import { pin } from "./inspect.js";
import { tintByConcept } from "./tint.js";

const ROW_LEAST = 16; // pixels
const ROW_MOST = 26; // a few rows are drawn taller
const NARROW = 560; // where two answers have no room beside each other
const MOST_ROWS = 200; // of packs with thousands of concepts, the strongest
const TOP = 16; // room for markers above the rows
const SHADES = 48;

const tip = h("div.heat-tip", { hidden: true });
let root;
let names = null; // null: there is nothing to show
let turn = null;
let lanes = [];
let ranking = null;
let rowHeight = ROW_LEAST;
let shownLane = 0;
let pointed = null; // {run, i}

const drawSoon = () => soon(drawAll);

export function setUpHeat() {
  root = $("#heat");
  document.body.append(tip);
  on("turns run-end lenses connection pin", () => soon(choose));
  on("run", () => soon(grow));
  on("tint", () => soon(nameRows));
  on("point", (at) => {
    pointed = at;
    drawSoon();
  });
  on("theme", () => {
    readColours();
    drawSoon();
  });
  new ResizeObserver(drawSoon).observe(root);
  readColours();
  choose();
}

const presentTurn = () => state.shownTurn ?? state.turns.at(-1) ?? null;

/** Take the turn to show, and build its lanes. */
function choose() {
  const wanted = presentTurn();
  const runs = wanted?.runs ?? [];
  const same = turn === wanted && lanes.length === runs.length && lanes.every((lane, k) => lane.run === runs[k]);
  if (!same) {
    turn = wanted;
    ranking = turn && new Ranking(runs);
    lanes = runs.map(makeLane);
  }
  showHead(runs.length > 1);
  if (!runs.some((run) => run.top.length)) {
    fill(root, h("p.blank-heat", nothing(runs)));
    names = null;
    return;
  }
  if (!same || !names) {
    names = h("div");
    const onwheel = (event) => {
      lanes[0].box.scrollTop += event.deltaY;
    };
    fill(root, h("div.rows-names", { onwheel }, names), ...lanes.map((lane) => lane.wrap));
  }
  ranking.count();
  ranking.sort();
  nameRows();
  drawAll();
}

function nothing(runs) {
  if (state.connection === "ready" && !state.lenses.length)
    return ["No lens pack is loaded. Start the server with ", h("code", "--pack PACK"), " to see concepts."];
  if (turn && !settings.pack) return ["No lens pack is chosen: choose one under Watch."];
  const running = runs.some((run) => run.abort);
  return [running ? "Reading…" : "Concepts appear here, row by row, while an answer is written."];
}

function showHead(pair) {
  const pack = chosenPack();
  const pickLane = (k) => {
    shownLane = k;
    drawAll();
  };
  const pickOrder = (order) => {
    change({ order });
    choose();
  };
  const zoom = (icon, title, factor) =>
    iconButton(icon, title, () => {
      change({ column: clamp(Math.round(settings.column * factor), 2, 28) });
      drawAll();
    });
  fill(
    $("#dock-head"),
    h("h2", "Concepts over tokens"),
    h("span.what", pack && `${pack.name}: ${pack.count} lenses at layer ${pack.layer}`),
    h("span.gap"),
    state.turns.length > 1 && turnSteps(),
    pair && h("span.lane-choice", segments("Answer", ["A", "B"], `${shownLane}`, pickLane)),
    segments("Order of concepts", { strength: "Strength", tree: "Tree" }, settings.order, pickOrder),
    h("span.step", zoom("minus", "Narrower columns", 0.74), zoom("plus", "Wider columns", 1.35)),
  );
}

/** The buttons that go from turn to turn. */
function turnSteps() {
  const at = state.turns.indexOf(turn);
  const go = (text, title, step) => {
    const wanted = at < 0 ? undefined : state.turns[at + step];
    const onclick = () => {
      state.shownTurn = wanted;
      choose();
    };
    return h("button.quiet", { title, disabled: !wanted, onclick }, text);
  };
  const place = `turn ${at + 1} of ${state.turns.length}`;
  return h("span.step", go("‹", "Previous turn", -1), place, go("›", "Next turn", 1));
}

// --- rows

/** Which concepts have a row, in which order. The order changes rarely, so that rows do not jump. */
class Ranking {
  constructor(runs) {
    this.runs = runs;
    this.sums = new Map(); // concept → sum of its scores
    this.counted = runs.map(() => 0);
    this.rows = [];
    this.place = new Map(); // concept → row
    this.sortAt = 4;
  }

  /** Add the new readings; return whether rows are due to change. */
  count() {
    const before = this.sums.size;
    this.runs.forEach((run, k) => {
      for (; this.counted[k] < run.top.length; this.counted[k] += 1)
        for (const [index, value] of readings(run, this.counted[k]))
          this.sums.set(index, (this.sums.get(index) ?? 0) + value);
    });
    const due = Math.max(...this.counted) >= this.sortAt;
    while (Math.max(...this.counted) >= this.sortAt) this.sortAt *= 2;
    return due || (this.sums.size > before && this.rows.length < MOST_ROWS);
  }

  sort() {
    const strongest = [...this.sums.keys()].sort((a, b) => this.sums.get(b) - this.sums.get(a)).slice(0, MOST_ROWS);
    const byTree = (a, b) => state.concepts[a].order - state.concepts[b].order;
    this.rows = settings.order === "tree" ? strongest.sort(byTree) : strongest;
    this.place = new Map(this.rows.map((index, row) => [index, row]));
  }
}

function nameRows() {
  if (!names) return;
  const chosen = settings.tint.kind === "concept" ? conceptIndex(settings.tint.id) : -1;
  root.classList.toggle("tree", settings.order === "tree");
  const row = (index) => {
    const { id, name, path, depth } = state.concepts[index];
    const about = { title: `${path.join(" › ")}: tint by it`, "--depth": depth, onclick: () => tintByConcept(id) };
    return h(`button${index === chosen ? ".chosen" : ""}`, about, name);
  };
  fill(names, ranking.rows.map(row));
}

function grow() {
  if (presentTurn() !== turn || !names) return choose();
  if (ranking.count()) {
    ranking.sort();
    nameRows();
  }
  drawAll();
}

// --- lanes

/** The canvas of one answer in a box that scrolls, with pointer and keys. */
function makeLane(run) {
  const canvas = h("canvas");
  const spacer = h("div.spacer");
  const about = { role: "img", "aria-label": "Heat map of concepts over tokens: arrow keys move a cursor" };
  const box = h("div.lane", { tabindex: 0, ...about }, spacer, canvas);
  const label = run.side && h("div.lane-name", run.side === "A" ? "A · steered" : "B · unsteered");
  const wrap = h("div.lane-wrap", box, label);
  const lane = { run, wrap, box, canvas, spacer, follow: true, cursor: null };
  set(box, {
    onscroll: () => {
      lane.follow = box.scrollLeft + box.clientWidth >= box.scrollWidth - 24;
      for (const other of lanes) if (other !== lane) other.box.scrollTop = box.scrollTop;
      drawSoon();
    },
    onpointermove: (event) => over(lane, event),
    onpointerleave: () => {
      tip.hidden = true;
      pointed = null;
      drawSoon();
    },
    onclick: (event) => {
      const { i } = cellAt(lane, event);
      if (i !== null) pin(run, i);
    },
    onkeydown: (event) => key(lane, event),
  });
  return lane;
}

/** The token below the pointer, null beside them, and the concept of the row there. */
function cellAt({ box, run }, event) {
  const { left, top } = box.getBoundingClientRect();
  const i = Math.floor((event.clientX - left + box.scrollLeft) / settings.column);
  const row = Math.floor((event.clientY - top + box.scrollTop - TOP) / rowHeight);
  return i >= 0 && i < run.tokens.length ? { i, index: ranking.rows[row] } : { i: null };
}

function over(lane, event) {
  const { run } = lane;
  const { i, index } = cellAt(lane, event);
  pointed = i === null ? null : { run, i };
  drawSoon();
  tip.hidden = index === undefined;
  if (tip.hidden) return;
  const value = score(run, i, index);
  const unread = value === null ? "not read" : "not in the top";
  const number = h("span.num", value ? value.toFixed(2) : unread);
  fill(tip, h("b", state.concepts[index].name), number, h("small", `“${shown(run.tokens[i])}” · token ${i}`));
  tip.style.left = `${Math.min(innerWidth - tip.offsetWidth - 8, event.clientX + 14)}px`;
  tip.style.top = `${Math.max(8, event.clientY - tip.offsetHeight - 10)}px`;
}

function key(lane, event) {
  const { run, box } = lane;
  const { column } = settings;
  if (event.key === "Enter" && lane.cursor) return pin(run, lane.cursor.i);
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  const from = lane.cursor ?? { i: Math.floor(box.scrollLeft / column) - step[0], row: -step[1] };
  const i = clamp(from.i + step[0], 0, run.tokens.length - 1);
  const row = clamp(from.row + step[1], 0, ranking.rows.length - 1);
  lane.cursor = { i, row };
  const x = i * column;
  if (x < box.scrollLeft) box.scrollLeft = x;
  if (x > box.scrollLeft + box.clientWidth - 40) box.scrollLeft = x - box.clientWidth + 60;
  const index = ranking.rows[row];
  say(`${run.tokens[i]}, ${state.concepts[index].name}: ${(score(run, i, index) ?? 0).toFixed(2)}`);
  pointed = { run, i };
  drawSoon();
}

// --- painting; a view is what of an answer is visible: {run, first, last, x, y, bottom, column}

let shades = [];
let ink = {};

/** Letters that fit below a column, and the room they take. */
const letters = () => (root.clientHeight < 170 ? 5 : 8);
const labelRoom = () => (settings.column >= 11 ? 10 + letters() * 6.6 : 0);
const left = (view, i) => i * view.column - view.x;

function readColours() {
  const rgb = (name) =>
    colour(name)
      .match(/[\d.]+/g)
      .slice(0, 3)
      .map(Number);
  const [low, high] = [rgb("--sunk"), rgb("--heat")];
  shades = Array.from(
    { length: SHADES + 1 },
    (_, k) => `rgb(${low.map((from, c) => Math.round(from + (high[c] - from) * (k / SHADES) ** 0.85)).join(" ")})`,
  );
  ink = { font: `11px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}` };
  for (const name of ["soft", "accent", "mark", "ink", "sunk"]) ink[name] = colour(`--${name}`);
}

function drawAll() {
  if (!names) return;
  const fits = Math.floor((root.clientHeight - labelRoom() - TOP - 12) / Math.max(1, ranking.rows.length));
  rowHeight = clamp(fits, ROW_LEAST, ROW_MOST);
  root.style.setProperty("--row", `${rowHeight}px`);
  const one = lanes.length > 1 && root.clientWidth < NARROW;
  lanes.forEach((lane, k) => {
    lane.wrap.hidden = one && k !== Number(shownLane);
  });
  const visible = lanes.filter((lane) => !lane.wrap.hidden);
  visible.forEach(draw);
  const { box } = visible[0];
  names.style.transform = `translateY(${-box.scrollTop}px)`;
  root.style.setProperty("--below", `${labelRoom() + box.offsetHeight - box.clientHeight}px`);
}

function draw({ box, canvas, run, spacer, follow, cursor }) {
  const { column } = settings;
  const height = ranking.rows.length * rowHeight;
  const labels = labelRoom();
  const { clientWidth: wide, clientHeight: tall } = box;
  if (!wide || !tall) return;
  set(spacer.style, { width: `${run.tokens.length * column + 12}px`, height: `${TOP + height + labels}px` });
  if (follow && run.status === "writing") box.scrollLeft = box.scrollWidth;
  const ratio = devicePixelRatio || 1;
  Object.assign(canvas, { width: wide * ratio, height: tall * ratio }); // this also clears it
  set(canvas.style, { width: `${wide}px`, height: `${tall}px` });
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  // Read once: every look at a scroll position may make the browser lay out the page.
  const { scrollLeft: x, scrollTop: y } = box;
  const bottom = Math.min(tall - labels, TOP + height - y);
  const first = Math.max(0, Math.floor(x / column));
  const last = Math.min(run.tokens.length, Math.ceil((x + wide) / column));
  const view = { run, first, last, x, y, bottom, column };
  drawCells(pen, view);
  drawFirings(pen, view);
  drawFrames(pen, view, cursor);
  if (labels) drawNames(pen, view);
  work.columns += last - first;
}

function drawCells(pen, view) {
  const { run, first, last, y, bottom, column } = view;
  const gap = column >= 6 ? 1 : 0;
  pen.save();
  pen.beginPath();
  pen.rect(0, TOP, 1e5, Math.max(0, bottom - TOP));
  pen.clip();
  const read = Math.min(last, run.top.length);
  const fillRow = (k, i, n) => pen.fillRect(left(view, i), TOP + k * rowHeight - y, n * column - gap, rowHeight - 1);
  pen.fillStyle = ink.sunk;
  const lowest = Math.min(ranking.rows.length, Math.ceil((bottom - TOP + y) / rowHeight));
  for (let k = Math.floor(y / rowHeight); k < lowest; k += 1) fillRow(k, first, read - first);
  for (let i = first; i < read; i += 1) {
    for (const [index, value] of readings(run, i)) {
      const k = ranking.place.get(index);
      if (k === undefined || value < 0.01) continue;
      pen.fillStyle = shades[Math.round(Math.min(1, value) * SHADES)];
      fillRow(k, i, 1);
    }
  }
  pen.restore();
}

/** Frames around the pinned token's column, the pointed one's, and the cursor's cell. */
function drawFrames(pen, view, cursor) {
  const { run, y, bottom, column } = view;
  pen.lineWidth = 1.5;
  const frame = (at, stroke) => {
    if (at?.run !== run) return;
    pen.strokeStyle = stroke;
    pen.strokeRect(left(view, at.i) - 0.5, TOP - 1, column, bottom - TOP + 1);
  };
  frame(state.pinned, ink.accent);
  frame(pointed, ink.ink);
  if (!cursor) return;
  pen.strokeStyle = ink.ink;
  pen.strokeRect(left(view, cursor.i) - 0.5, TOP + cursor.row * rowHeight - y - 0.5, column, rowHeight);
}

/** The tokens below their columns. */
function drawNames(pen, view) {
  const { run, first, last, bottom, column } = view;
  Object.assign(pen, { font: ink.font, textAlign: "right", textBaseline: "middle" });
  for (let i = first; i < last; i += 1) {
    pen.fillStyle = pointed?.run === run && pointed.i === i ? ink.ink : ink.soft;
    pen.save();
    pen.translate(left(view, i) + column / 2, bottom + 5);
    pen.rotate(-Math.PI / 2);
    const text = shown(run.tokens[i]).replace(/^·/, "");
    pen.fillText(text.length > letters() ? `${text.slice(0, letters() - 1)}…` : text, 0, 0);
    pen.restore();
  }
}

/** A marker above each token where a rule fired, and a bar as long as a switched vector stayed on. */
function drawFirings(pen, view) {
  const { run, first, last, bottom, column } = view;
  const since = new Map();
  const rect = (alpha, ...box) => {
    pen.globalAlpha = alpha;
    pen.fillRect(...box);
    pen.globalAlpha = 1;
  };
  const bar = (from, to) => rect(0.28, left(view, from) + column / 2, 4, (to - from) * column, 4);
  pen.fillStyle = ink.mark;
  for (const { name, action, at } of run.firings) {
    if (action.endsWith("_off")) {
      bar(since.get(name) ?? at, at);
      since.delete(name);
      continue;
    }
    if (action === "steer") since.set(name, at);
    if (at < first || at > last) continue;
    const x = left(view, at) + column / 2;
    const half = Math.min(5, column / 2);
    pen.beginPath();
    pen.moveTo(x - half, 3);
    pen.lineTo(x + half, 3);
    pen.lineTo(x, 12);
    pen.fill();
    rect(0.3, x - 0.5, 12, 1, bottom - 12);
  }
  for (const from of since.values()) bar(from, run.tokens.length - 0.5);
}

// One answer in the heat map: a canvas in a box that scrolls, with pointer and keys. It only draws the visible columns,
// so its cost does not grow with the text.
import { colour, fill, h, say, shown, work } from "./dom.js";
import { emit, settings, state } from "./state.js";
import { pin } from "./inspect.js";
import { score } from "./runs.js";

export const TOP = 16; // room for markers above the rows
const SHADES = 48;

/** What the lanes of a turn share. */
export const map = {
  root: null,
  lanes: [],
  ranking: null,
  pointed: null, // {run, i}
  row: 16, // height of a row
};

const tip = h("div.heat-tip", { hidden: true });
document.body.append(tip);

export function makeLane(run) {
  const canvas = h("canvas");
  const spacer = h("div.spacer");
  const box = h(
    "div.lane",
    { tabindex: 0, role: "img", "aria-label": "Heat map of concepts over tokens: arrow keys move a cursor" },
    spacer,
    canvas,
  );
  const label = run.side ? h("div.lane-name", run.side === "A" ? "A · steered" : "B · unsteered") : null;
  const wrap = h("div.lane-wrap", box, label);
  const lane = { run, wrap, box, canvas, spacer, follow: true, cursor: null, wide: 0, tall: 0 };
  box.addEventListener(
    "scroll",
    () => {
      lane.follow = box.scrollLeft + box.clientWidth >= box.scrollWidth - 24;
      for (const other of map.lanes)
        if (other !== lane && other.box.scrollTop !== box.scrollTop) other.box.scrollTop = box.scrollTop;
      emit("heat");
    },
    { passive: true },
  );
  box.addEventListener("pointermove", (event) => over(lane, event));
  box.addEventListener("pointerleave", () => {
    tip.hidden = true;
    map.pointed = null;
    emit("heat");
  });
  box.addEventListener("click", (event) => {
    const at = cellAt(lane, event);
    if (at) pin(run, at.i);
  });
  box.addEventListener("keydown", (event) => key(lane, event));
  return lane;
}

/** Letters that fit below a column, and the room they take. */
const letters = () => (map.root.clientHeight < 170 ? 5 : 8);
export const labelRoom = () => (settings.column >= 11 ? 10 + letters() * 6.6 : 0);

export function draw(lane) {
  const { box, canvas, run } = lane;
  const column = settings.column;
  const rows = map.ranking.rows.length;
  const labels = labelRoom();
  const [wide, tall] = [box.clientWidth, box.clientHeight];
  if (!wide || !tall) return;
  setSize(lane.spacer, run.tokens.length * column + 12, TOP + rows * map.row + labels);
  if (lane.follow && run.status === "writing") box.scrollLeft = box.scrollWidth;
  const ratio = devicePixelRatio || 1;
  if (lane.wide !== wide || lane.tall !== tall || lane.ratio !== ratio) {
    Object.assign(lane, { wide, tall, ratio });
    Object.assign(canvas, { width: wide * ratio, height: tall * ratio });
    setSize(canvas, wide, tall);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, wide, tall);
  // Read once: every look at a scroll position may make the browser lay out the page.
  const [x, y] = [box.scrollLeft, box.scrollTop];
  const bottom = Math.min(tall - labels, TOP + rows * map.row - y);
  const first = Math.max(0, Math.floor(x / column));
  const last = Math.min(run.tokens.length, Math.ceil((x + wide) / column));
  const view = { run, first, last, x, y, bottom, column };
  drawCells(pen, view);
  drawFirings(pen, view);
  drawFrames(pen, view, lane.cursor);
  if (labels) drawNames(pen, view);
  work.columns += last - first;
}

function setSize({ style }, wide, tall) {
  if (style.width !== `${wide}px`) style.width = `${wide}px`;
  if (style.height !== `${tall}px`) style.height = `${tall}px`;
}

function cellAt(lane, event) {
  const box = lane.box.getBoundingClientRect();
  const i = Math.floor((event.clientX - box.left + lane.box.scrollLeft) / settings.column);
  const row = Math.floor((event.clientY - box.top + lane.box.scrollTop - TOP) / map.row);
  return i >= 0 && i < lane.run.tokens.length ? { i, row } : null;
}

function over(lane, event) {
  const at = cellAt(lane, event);
  map.pointed = at && { run: lane.run, i: at.i };
  emit("heat");
  const index = at && map.ranking.rows[at.row];
  if (index === undefined || index === null) {
    tip.hidden = true;
    return;
  }
  const one = state.concepts[index];
  const value = score(lane.run, at.i, index);
  const unread = value === null ? "not read" : "not in the top";
  fill(
    tip,
    h("b", one.name),
    h("span.num", value ? value.toFixed(2) : unread),
    h("small", `“${shown(lane.run.tokens[at.i])}” · token ${at.i}`),
  );
  tip.hidden = false;
  tip.style.left = `${Math.min(innerWidth - tip.offsetWidth - 8, event.clientX + 14)}px`;
  tip.style.top = `${Math.max(8, event.clientY - tip.offsetHeight - 10)}px`;
}

function key(lane, event) {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (event.key === "Enter" && lane.cursor) return pin(lane.run, lane.cursor.i);
  if (!step) return;
  event.preventDefault();
  const clamp = (value, most) => Math.max(0, Math.min(most, value));
  const from = lane.cursor ?? { i: Math.floor(lane.box.scrollLeft / settings.column) - step[0], row: -step[1] };
  lane.cursor = {
    i: clamp(from.i + step[0], lane.run.tokens.length - 1),
    row: clamp(from.row + step[1], map.ranking.rows.length - 1),
  };
  const x = lane.cursor.i * settings.column;
  if (x < lane.box.scrollLeft) lane.box.scrollLeft = x;
  if (x > lane.box.scrollLeft + lane.box.clientWidth - 40) lane.box.scrollLeft = x - lane.box.clientWidth + 60;
  const index = map.ranking.rows[lane.cursor.row];
  const value = score(lane.run, lane.cursor.i, index) ?? 0;
  say(`${lane.run.tokens[lane.cursor.i]}, ${state.concepts[index].name}: ${value.toFixed(2)}`);
  map.pointed = { run: lane.run, i: lane.cursor.i };
  emit("heat");
}

// --- painting; a view is what of an answer is visible: {run, first, last, x, y, bottom, column}

let shades = [];
let ink = {};

const left = (view, i) => i * view.column - view.x;

export function readColours() {
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

function drawCells(pen, view) {
  const { run, first, last, y, bottom, column } = view;
  const gap = column >= 6 ? 1 : 0;
  pen.save();
  pen.beginPath();
  pen.rect(0, TOP, 1e5, Math.max(0, bottom - TOP));
  pen.clip();
  const read = Math.min(last, run.top.length);
  const fillRow = (k, i, n) => pen.fillRect(left(view, i), TOP + k * map.row - y, n * column - gap, map.row - 1);
  pen.fillStyle = ink.sunk;
  const lowest = Math.min(map.ranking.rows.length, Math.ceil((bottom - TOP + y) / map.row));
  for (let k = Math.floor(y / map.row); k < lowest; k += 1) fillRow(k, first, read - first);
  for (let i = first; i < read; i += 1) {
    const top = run.top[i] ?? [];
    for (let j = 0; j < top.length; j += 2) {
      const k = map.ranking.place.get(top[j]);
      if (k === undefined || top[j + 1] < 0.01) continue;
      pen.fillStyle = shades[Math.round(Math.min(1, top[j + 1]) * SHADES)];
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
  frame(map.pointed, ink.ink);
  if (!cursor) return;
  pen.strokeStyle = ink.ink;
  pen.strokeRect(left(view, cursor.i) - 0.5, TOP + cursor.row * map.row - y - 0.5, column, map.row);
}

/** The tokens below their columns. */
function drawNames(pen, view) {
  const { run, first, last, bottom, column } = view;
  pen.font = ink.font;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (let i = first; i < last; i += 1) {
    pen.fillStyle = map.pointed?.run === run && map.pointed.i === i ? ink.ink : ink.soft;
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
  const bar = (from, to) => {
    pen.globalAlpha = 0.28;
    pen.fillRect(left(view, from) + column / 2, 4, (to - from) * column, 4);
    pen.globalAlpha = 1;
  };
  pen.fillStyle = ink.mark;
  for (const { name, action, at } of run.firings) {
    if (action.endsWith("_off")) {
      bar(since.get(name) ?? at, at);
      since.delete(name);
      continue;
    }
    if (action === "steer") since.set(name, at);
    if (at < first || at > last) continue;
    const x = left(view, at) + column / 2,
      half = Math.min(5, column / 2);
    pen.beginPath();
    pen.moveTo(x - half, 3);
    pen.lineTo(x + half, 3);
    pen.lineTo(x, 12);
    pen.fill();
    pen.globalAlpha = 0.3;
    pen.fillRect(x - 0.5, 12, 1, bottom - 12);
    pen.globalAlpha = 1;
  }
  for (const from of since.values()) bar(from, run.tokens.length - 0.5);
}

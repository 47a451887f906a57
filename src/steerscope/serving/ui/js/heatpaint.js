// Painting the heat map: cells, markers of rules, frames and token names. A view is what of an answer is in sight:
// {run, first, last, x, y, bottom, column, row, rows, place}.
import { colour, shown } from "./dom.js";
import { state } from "./state.js";

export const TOP = 16; // room for markers above the rows
const SHADES = 48;
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
  ink = {
    soft: colour("--soft"),
    faint: colour("--faint"),
    line: colour("--line"),
    accent: colour("--accent"),
    mark: colour("--mark"),
    ink: colour("--ink"),
    sunk: colour("--sunk"),
    font: `11px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`,
  };
}

export function cells(pen, view) {
  const { run, first, last, y, bottom, column, row: tall, rows, place } = view;
  const gap = column >= 6 ? 1 : 0;
  pen.save();
  pen.beginPath();
  pen.rect(0, TOP, 1e5, Math.max(0, bottom - TOP));
  pen.clip();
  const read = Math.min(last, run.top.length);
  pen.fillStyle = ink.sunk;
  const lowest = Math.min(rows, Math.ceil((bottom - TOP + y) / tall));
  for (let k = Math.floor(y / tall); k < lowest; k += 1)
    pen.fillRect(left(view, first), TOP + k * tall - y, (read - first) * column - gap, tall - 1);
  for (let i = first; i < read; i += 1) {
    const top = run.top[i];
    if (!top) continue;
    for (let j = 0; j < top.length; j += 2) {
      const k = place.get(top[j]);
      if (k === undefined || top[j + 1] < 0.01) continue;
      pen.fillStyle = shades[Math.round(Math.min(1, top[j + 1]) * SHADES)];
      pen.fillRect(left(view, i), TOP + k * tall - y, column - gap, tall - 1);
    }
  }
  pen.restore();
}

/** `pointed` and `cursor` may be null; `letters` is how many of a token's letters fit, 0 for none. */
export function furniture(pen, view, { pointed, cursor, letters }) {
  const { run, first, last, y, bottom, column, row: tall } = view;
  firings(pen, view);
  const frame = (i, stroke) => {
    pen.strokeStyle = stroke;
    pen.lineWidth = 1.5;
    pen.strokeRect(left(view, i) - 0.5, TOP - 1, column, bottom - TOP + 1);
  };
  if (state.pinned?.run === run) frame(state.pinned.i, ink.accent);
  if (pointed?.run === run) frame(pointed.i, ink.ink);
  if (cursor) {
    pen.strokeStyle = ink.ink;
    pen.strokeRect(left(view, cursor.i) - 0.5, TOP + cursor.row * tall - y - 0.5, column, tall);
  }
  if (!letters) return;
  pen.font = ink.font;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (let i = first; i < last; i += 1) {
    const strong = pointed?.run === run && pointed.i === i;
    pen.fillStyle = strong ? ink.ink : ink.soft;
    pen.save();
    pen.translate(left(view, i) + column / 2, bottom + 5);
    pen.rotate(-Math.PI / 2);
    const text = shown(run.tokens[i]).replace(/^·/, "");
    pen.fillText(text.length > letters ? `${text.slice(0, letters - 1)}…` : text, 0, 0);
    pen.restore();
  }
}

/** A marker above each token where a rule fired, and a bar as long as a switched vector stayed on. */
function firings(pen, view) {
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

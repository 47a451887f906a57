// One answer in the heat map: a canvas in a box that scrolls, with pointer and keys.
import { h, say, shown, work } from "./dom.js";
import { emit, settings, state } from "./state.js";
import { cells, furniture, TOP } from "./heatpaint.js";
import { pin } from "./inspect.js";
import { score } from "./runs.js";

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
  const label = run.side ? h("div.lane-name", {}, run.side === "A" ? "A · steered" : "B · unsteered") : null;
  const wrap = h("div.lane-wrap", {}, box, label);
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
  const total = `${run.tokens.length * column + 12}px`;
  if (lane.spacer.style.width !== total) lane.spacer.style.width = total;
  const height = `${TOP + rows * map.row + labels}px`;
  if (lane.spacer.style.height !== height) lane.spacer.style.height = height;
  if (lane.follow && run.status === "writing") box.scrollLeft = box.scrollWidth;
  const ratio = devicePixelRatio || 1;
  if (lane.wide !== wide || lane.tall !== tall || lane.ratio !== ratio) {
    Object.assign(lane, { wide, tall, ratio });
    Object.assign(canvas, { width: wide * ratio, height: tall * ratio });
    Object.assign(canvas.style, { width: `${wide}px`, height: `${tall}px` });
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, wide, tall);
  // Read once: every look at a scroll position may make the browser lay out the page.
  const [x, y] = [box.scrollLeft, box.scrollTop];
  const bottom = Math.min(tall - labels, TOP + rows * map.row - y);
  const first = Math.max(0, Math.floor(x / column));
  const last = Math.min(run.tokens.length, Math.ceil((x + wide) / column));
  const view = { run, first, last, x, y, bottom, column, row: map.row, rows, place: map.ranking.place };
  cells(pen, view);
  furniture(pen, view, {
    pointed: map.pointed?.run === run ? map.pointed : null,
    cursor: lane.cursor,
    letters: labels ? letters() : 0,
  });
  work.columns += last - first;
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
  tip.replaceChildren(
    h("b", {}, one.name),
    h("span.num", {}, value === null ? "not read" : value === 0 ? "not in the top" : value.toFixed(2)),
    h("small", {}, `“${shown(lane.run.tokens[at.i])}” · token ${at.i}`),
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

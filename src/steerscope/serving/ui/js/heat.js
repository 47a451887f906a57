// Concepts over tokens, on a canvas that only ever draws the columns in sight: its cost does not grow with the text.
import { $, h, iconButton, soon } from "./dom.js";
import { change, conceptIndex, on, settings, state } from "./state.js";
import { segments } from "./controls.js";
import { readColours, TOP } from "./heatpaint.js";
import { draw, labelRoom, makeLane, map } from "./lane.js";
import { Ranking } from "./ranking.js";
import { setTint } from "./tint.js";

const ROW_LEAST = 16;
const ROW_MOST = 26; // a few rows are drawn taller
const NARROW = 560; // where two answers have no room beside each other
let root;
let head;
let names = null; // null: there is nothing to show
let turn = null;
let shownLane = 0;

export function setUpHeat() {
  [root, head] = [$("#heat"), $("#dock-head")];
  map.root = root;
  on("turns run-end lenses connection pin", () => soon(choose));
  on("run", () => soon(grow));
  on("tint", () => {
    soon(nameRows);
    soon(drawAll);
  });
  on("point", (at) => {
    map.pointed = at;
    soon(drawAll);
  });
  on("heat", () => soon(drawAll));
  on("theme", () => {
    readColours();
    soon(drawAll);
  });
  new ResizeObserver(() => soon(drawAll)).observe(root);
  readColours();
  choose();
}

const presentTurn = () => state.shownTurn ?? state.turns.at(-1) ?? null;

/** Take the turn that is to be seen, and build what shows it. */
function choose() {
  const wanted = presentTurn();
  const same =
    wanted &&
    turn === wanted &&
    map.lanes.length === wanted.runs.length &&
    map.lanes.every((lane, k) => lane.run === wanted.runs[k]);
  if (!same) {
    turn = wanted;
    map.ranking = turn && new Ranking(turn);
    map.lanes = turn ? turn.runs.map(makeLane) : [];
  }
  showHead();
  const read = turn?.runs.some((run) => run.top.length);
  if (!read) {
    root.replaceChildren(nothing());
    names = null;
    return;
  }
  if (!same || !names) {
    names = h("div");
    const box = h(
      "div.rows-names",
      {
        onwheel: (event) => {
          map.lanes[0].box.scrollTop += event.deltaY;
        },
      },
      names,
    );
    root.replaceChildren(box, ...map.lanes.map((lane) => lane.wrap));
  }
  map.ranking.settle();
  nameRows();
  drawAll();
}

function nothing() {
  const note = (...text) => h("p.blank-heat", {}, ...text);
  if (state.connection === "ready" && !state.lenses.length)
    return note("Nothing reads concepts here. Start the server with ", h("code", {}, "--pack PACK"), " to see them.");
  if (turn && !settings.pack) return note("No lens pack is chosen: take one under Watch.");
  return note(
    turn?.runs.some((run) => run.status === "waiting" || run.status === "writing")
      ? "Reading…"
      : "Concepts appear here, row by row, while an answer is written.",
  );
}

function showHead() {
  const at = turn ? state.turns.indexOf(turn) : -1;
  const go = (step) => () => {
    state.shownTurn = state.turns[at + step];
    choose();
  };
  const back = iconButton("minus", "Narrower columns", () => zoom(-1));
  const forth = iconButton("plus", "Wider columns", () => zoom(1));
  const earlier = h(
    "button.quiet",
    { type: "button", title: "The turn before", disabled: at < 1, onclick: go(-1) },
    "‹",
  );
  const next = h(
    "button.quiet",
    { type: "button", title: "The turn after", disabled: at < 0 || at >= state.turns.length - 1, onclick: go(1) },
    "›",
  );
  const pack = state.lenses.find((one) => one.name === settings.pack);
  const what = [pack && `${pack.name}: ${pack.count} lenses at layer ${pack.layer}`].filter(Boolean).join(" · ");
  head.replaceChildren(
    h("h2", {}, "Concepts over tokens"),
    h("span.what", {}, what),
    h("span.gap"),
    ...(state.turns.length > 1 ? [h("span.step", {}, earlier, `turn ${at + 1} of ${state.turns.length}`, next)] : []),
    ...(turn?.runs.length > 1
      ? [
          h(
            "span.lane-choice",
            {},
            segments({
              label: "Answer",
              options: [
                [0, "A"],
                [1, "B"],
              ],
              value: shownLane,
              change: (k) => {
                shownLane = k;
                drawAll();
              },
            }),
          ),
        ]
      : []),
    segments({
      label: "Order of concepts",
      options: [
        ["strength", "Strength"],
        ["tree", "Tree"],
      ],
      value: settings.order,
      change: (order) => {
        change({ order });
        choose();
      },
    }),
    h("span.step", {}, back, forth),
  );
}

function zoom(step) {
  change({ column: Math.max(2, Math.min(28, Math.round(settings.column * (step > 0 ? 1.35 : 0.74)))) });
  drawAll();
}

// --- rows

function nameRows() {
  if (!names) return;
  const chosen = settings.tint.kind === "concept" ? conceptIndex(settings.tint.id) : -1;
  root.classList.toggle("tree", settings.order === "tree");
  names.replaceChildren(
    ...map.ranking.rows.map((index) => {
      const one = state.concepts[index];
      return h(
        `button${index === chosen ? ".chosen" : ""}`,
        {
          type: "button",
          title: `${one.path.join(" › ")}: tint by it`,
          "--depth": one.depth,
          onclick: () => setTint({ kind: "concept", id: one.id }),
        },
        one.name,
      );
    }),
  );
}

function grow() {
  if (presentTurn() !== turn || !names) return choose();
  if (map.ranking.count()) nameRows();
  drawAll();
}

function drawAll() {
  if (!names) return;
  const fits = Math.floor((root.clientHeight - labelRoom() - TOP - 12) / Math.max(1, map.ranking.rows.length));
  map.row = Math.max(ROW_LEAST, Math.min(ROW_MOST, fits));
  root.style.setProperty("--row", `${map.row}px`);
  const one = map.lanes.length > 1 && root.clientWidth < NARROW;
  map.lanes.forEach((lane, k) => {
    lane.wrap.hidden = one && k !== Math.min(shownLane, map.lanes.length - 1);
  });
  for (const lane of map.lanes) if (!lane.wrap.hidden) draw(lane);
  const { box } = map.lanes.find((lane) => !lane.wrap.hidden);
  names.style.transform = `translateY(${-box.scrollTop}px)`;
  root.style.setProperty("--below", `${labelRoom() + box.offsetHeight - box.clientHeight}px`);
}

// Concepts over tokens: which turn and which rows the heat map shows, and the controls above it.
import { $, fill, h, iconButton, soon } from "./dom.js";
import { change, conceptIndex, on, settings, state } from "./state.js";
import { segments } from "./controls.js";
import { draw, labelRoom, makeLane, map, readColours, TOP } from "./lane.js";
import { tintByConcept } from "./tint.js";

const ROW_LEAST = 16;
const ROW_MOST = 26; // a few rows are drawn taller
const NARROW = 560; // where two answers have no room beside each other
const MOST_ROWS = 200; // of packs with thousands of concepts, the strongest
let root;
let head;
let names = null; // null: there is nothing to show
let turn = null;
let shownLane = 0;

export function setUpHeat() {
  root = $("#heat");
  head = $("#dock-head");
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

/** Take the turn to show, and build its lanes. */
function choose() {
  const wanted = presentTurn();
  const runs = wanted?.runs ?? [];
  const same =
    turn === wanted && map.lanes.length === runs.length && map.lanes.every((lane, k) => lane.run === runs[k]);
  if (!same) {
    turn = wanted;
    map.ranking = turn && new Ranking(turn);
    map.lanes = runs.map(makeLane);
  }
  showHead();
  if (!runs.some((run) => run.top.length)) {
    fill(root, nothing());
    names = null;
    return;
  }
  if (!same || !names) {
    names = h("div");
    const scroll = (event) => {
      map.lanes[0].box.scrollTop += event.deltaY;
    };
    fill(
      root,
      h("div.rows-names", { onwheel: scroll }, names),
      map.lanes.map((lane) => lane.wrap),
    );
  }
  map.ranking.settle();
  nameRows();
  drawAll();
}

function nothing() {
  const note = (...text) => h("p.blank-heat", ...text);
  if (state.connection === "ready" && !state.lenses.length)
    return note("No lens pack is loaded. Start the server with ", h("code", "--pack PACK"), " to see concepts.");
  if (turn && !settings.pack) return note("No lens pack is chosen: choose one under Watch.");
  const running = turn?.runs.some((run) => run.status === "waiting" || run.status === "writing");
  return note(running ? "Reading…" : "Concepts appear here, row by row, while an answer is written.");
}

function showHead() {
  const pack = state.lenses.find((one) => one.name === settings.pack);
  const lanes = [
    [0, "A"],
    [1, "B"],
  ];
  const orders = [
    ["strength", "Strength"],
    ["tree", "Tree"],
  ];
  const pickLane = (k) => {
    shownLane = k;
    drawAll();
  };
  const pickOrder = (order) => {
    change({ order });
    choose();
  };
  fill(
    head,
    h("h2", "Concepts over tokens"),
    h("span.what", pack && `${pack.name}: ${pack.count} lenses at layer ${pack.layer}`),
    h("span.gap"),
    state.turns.length > 1 && turnSteps(),
    turn?.runs.length > 1 && h("span.lane-choice", segments("Answer", lanes, shownLane, pickLane)),
    segments("Order of concepts", orders, settings.order, pickOrder),
    h(
      "span.step",
      iconButton("minus", "Narrower columns", () => zoom(0.74)),
      iconButton("plus", "Wider columns", () => zoom(1.35)),
    ),
  );
}

/** The buttons that go from turn to turn. */
function turnSteps() {
  const at = turn ? state.turns.indexOf(turn) : -1;
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

function zoom(factor) {
  change({ column: Math.max(2, Math.min(28, Math.round(settings.column * factor))) });
  drawAll();
}

// --- rows

function nameRows() {
  if (!names) return;
  const chosen = settings.tint.kind === "concept" ? conceptIndex(settings.tint.id) : -1;
  root.classList.toggle("tree", settings.order === "tree");
  const rows = map.ranking.rows.map((index) => {
    const { id, name, path, depth } = state.concepts[index];
    const about = { title: `${path.join(" › ")}: tint by it`, "--depth": depth, onclick: () => tintByConcept(id) };
    return h(`button${index === chosen ? ".chosen" : ""}`, about, name);
  });
  fill(names, rows);
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
  const shown = map.lanes.filter((lane) => !lane.wrap.hidden);
  shown.forEach(draw);
  const { box } = shown[0];
  names.style.transform = `translateY(${-box.scrollTop}px)`;
  root.style.setProperty("--below", `${labelRoom() + box.offsetHeight - box.clientHeight}px`);
}

/** Which concepts have a row, in which order. The order changes rarely, so that rows do not jump. */
class Ranking {
  constructor(turn) {
    this.turn = turn;
    this.sums = new Map(); // concept → sum of its scores
    this.counted = turn.runs.map(() => 0);
    this.rows = [];
    this.place = new Map(); // concept → row
    this.sortAt = 4;
  }

  /** Add the new readings; true when rows changed. */
  count() {
    let fresh = false;
    this.turn.runs.forEach((run, k) => {
      for (; this.counted[k] < run.top.length; this.counted[k] += 1) {
        const top = run.top[this.counted[k]] ?? [];
        for (let j = 0; j < top.length; j += 2) {
          if (!this.sums.has(top[j])) fresh = true;
          this.sums.set(top[j], (this.sums.get(top[j]) ?? 0) + top[j + 1]);
        }
      }
    });
    const n = Math.max(...this.counted);
    const due = n >= this.sortAt;
    while (n >= this.sortAt) this.sortAt *= 2;
    if (due || (fresh && this.rows.length < MOST_ROWS)) {
      this.sort();
      return true;
    }
    return false;
  }

  settle() {
    this.count();
    this.sort();
  }

  sort() {
    const strongest = [...this.sums.keys()].sort((a, b) => this.sums.get(b) - this.sums.get(a)).slice(0, MOST_ROWS);
    const byTree = (a, b) => state.concepts[a].order - state.concepts[b].order;
    this.rows = settings.order === "tree" ? strongest.sort(byTree) : strongest;
    this.place = new Map(this.rows.map((index, row) => [index, row]));
  }
}

// Which colour a token has, and the legend that says what it means.
import { $, h, short, signed, soon } from "./dom.js";
import { change, conceptIndex, emit, hue, inTree, on, settings, state } from "./state.js";
import { Combo } from "./combo.js";
import { layersOf } from "./steering.js";
import { score } from "./runs.js";

/** {v: 0…1, tone: a CSS colour} of a token. */
export function paint(run, i) {
  const tint = settings.tint;
  if (tint.kind === "lead") {
    const top = run.top[i];
    return top?.length ? { v: top[1], tone: tone(top[0]) } : NOTHING;
  }
  if (tint.kind === "concept") return { v: score(run, i, conceptIndex(tint.id)) ?? 0, tone: "var(--heat)" };
  if (tint.kind === "vector") {
    const value = run.projections[tint.name]?.[tint.layer]?.[i];
    if (value === undefined || value === null) return NOTHING;
    const { middle, reach } = range();
    const away = (value - middle) / reach;
    return { v: Math.min(1, Math.abs(away)), tone: away < 0 ? "var(--cool)" : "var(--heat)" };
  }
  return NOTHING;
}
const LEADERS = 4;
const tone = (index) => `oklch(0.72 0.13 ${hue(index).toFixed(0)})`;
const NOTHING = { v: 0, tone: "var(--heat)" };

// Projections of one layer often share a large offset, so colours are told from their median over the conversation.
let cached = null;
export function range() {
  if (cached) return cached;
  const { name, layer } = settings.tint;
  const values = [];
  for (const turn of state.turns)
    for (const run of turn.runs)
      for (const one of run.said ? [run, run.said] : [run])
        values.push(...(one.projections[name]?.[layer] ?? []).filter(Number.isFinite));
  values.sort((a, b) => a - b);
  const middle = values[values.length >> 1] ?? 0;
  const far = values.map((value) => Math.abs(value - middle)).sort((a, b) => a - b);
  cached = { middle, reach: far[Math.floor(far.length * 0.97)] || 1, n: values.length };
  return cached;
}

let combo;
export function setUpTint() {
  combo = new Combo($("#tint"), { label: "Tint tokens by", items, pick: (value) => setTint(JSON.parse(value)) });
  $("#tint-layer select").addEventListener("change", (event) =>
    setTint({ ...settings.tint, layer: Number(event.target.value) }),
  );
  on("vectors lenses concepts turns", () => soon(show));
  on("run-end", () => {
    cached = null;
    if (settings.tint.kind === "vector") emit("tint");
    soon(show);
  });
  show();
}

export function setTint(tint) {
  cached = null;
  if (tint.kind === "vector" && tint.layer === undefined) {
    const vector = state.vectors.find((one) => one.name === tint.name);
    const has = vector ? layersOf(vector) : [0];
    tint = { ...tint, layer: has.at(-1) };
  }
  change({ tint }, "tint");
  soon(show);
}

function items() {
  const list = [
    { value: JSON.stringify({ kind: "lead" }), label: "Leading concept", hint: "a hue each" },
    { value: JSON.stringify({ kind: "none" }), label: "No tint" },
  ];
  if (state.vectors.length) list.push({ group: "Projection on a vector" });
  for (const vector of state.vectors) {
    list.push({ value: JSON.stringify({ kind: "vector", name: vector.name }), label: vector.name, hint: "vector" });
  }
  if (state.concepts.length) list.push({ group: "One concept" });
  for (const one of inTree()) {
    list.push({
      value: JSON.stringify({ kind: "concept", id: one.id }),
      label: one.name,
      depth: one.depth,
      find: one.path.join(" "),
    });
  }
  return list;
}

function show() {
  const tint = settings.tint;
  const one = state.concepts[conceptIndex(tint.id)];
  const names = {
    none: "No tint",
    lead: "Leading concept",
    concept: one?.name ?? tint.id,
    vector: `Projection on ${tint.name}`,
  };
  combo.show(names[tint.kind]);
  const layerBox = $("#tint-layer");
  layerBox.hidden = tint.kind !== "vector";
  if (tint.kind === "vector") {
    const vector = state.vectors.find((other) => other.name === tint.name);
    const layers = vector ? layersOf(vector) : [tint.layer];
    $("select", layerBox).replaceChildren(
      ...layers.map((layer) => h("option", { value: layer, selected: layer === tint.layer }, `${layer}`)),
    );
  }
  $("#legend").replaceChildren(...legend(tint));
}

function legend(tint) {
  if (tint.kind === "none") return [];
  if (tint.kind === "lead") return leaders();
  if (tint.kind === "concept") return [h("span", {}, "0"), h("i.one"), h("span", {}, "1")];
  const { middle, reach, n } = range();
  if (!n) return [h("span", {}, "measured when an answer ends")];
  return [
    h("span", {}, signed(middle - reach)),
    h("i.two", { title: `median ${short(middle)}` }),
    h("span", {}, signed(middle + reach)),
  ];
}

/** The hues that are seen most in the last turn that was read. */
function leaders() {
  const counts = new Map();
  const turn = state.turns.findLast((one) => one.runs.some((run) => run.top.length));
  for (const run of turn?.runs ?? [])
    for (const top of run.top) if (top?.length) counts.set(top[0], (counts.get(top[0]) ?? 0) + 1);
  const most = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, LEADERS);
  if (!most.length) return [h("span", {}, "a hue for each concept"), h("i.many")];
  return most.map((index) =>
    h(
      "button.key",
      {
        type: "button",
        title: "Tint by this concept",
        onclick: () => setTint({ kind: "concept", id: state.concepts[index].id }),
      },
      h("i", { "--tone": tone(index) }),
      state.concepts[index].name,
    ),
  );
}

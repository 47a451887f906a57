// The colour of each token, and the legend that explains it.
import { $, fill, h, short, signed, soon } from "./dom.js";
import { change, conceptById, conceptIndex, conceptItems, emit, hue, on, settings, state } from "./state.js";
import { Combo } from "./combo.js";
import { layersOf } from "./steering.js";
import { score } from "./runs.js";

const LEADERS = 4;
const NOTHING = { v: 0, tone: "var(--heat)" };
const tone = (index) => `oklch(0.72 0.13 ${hue(index).toFixed(0)})`;

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

let cached = null;
/** The projections' median and spread. One layer's often share a large offset, so colours start from the median. */
function range() {
  if (cached) return cached;
  const { name, layer } = settings.tint;
  const runs = state.turns.flatMap((turn) => turn.runs).flatMap((run) => (run.said ? [run, run.said] : [run]));
  const values = runs.flatMap((run) => run.projections[name]?.[layer] ?? []).filter(Number.isFinite);
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

/** The layers of the tint's vector. */
function layersOfTint(tint) {
  const vector = state.vectors.find((one) => one.name === tint.name);
  return vector ? layersOf(vector) : [tint.layer ?? 0];
}

export function setTint(tint) {
  cached = null;
  if (tint.kind === "vector" && tint.layer === undefined) tint = { ...tint, layer: layersOfTint(tint).at(-1) };
  change({ tint }, "tint");
  soon(show);
}

export const tintByConcept = (id) => setTint({ kind: "concept", id });

function items() {
  const group = (name, list) => (list.length ? [{ group: name }, ...list] : []);
  const vectors = state.vectors.map(({ name }) => ({ value: { kind: "vector", name }, label: name, hint: "vector" }));
  const concepts = conceptItems().map((one) => ({ ...one, value: { kind: "concept", id: one.value } }));
  const list = [
    { value: { kind: "lead" }, label: "Leading concept", hint: "a hue each" },
    { value: { kind: "none" }, label: "No tint" },
    ...group("Projection on a vector", vectors),
    ...group("One concept", concepts),
  ];
  return list.map((item) => (item.group ? item : { ...item, value: JSON.stringify(item.value) }));
}

function show() {
  const tint = settings.tint;
  const names = {
    none: "No tint",
    lead: "Leading concept",
    concept: conceptById(tint.id)?.name ?? tint.id,
    vector: `Projection on ${tint.name}`,
  };
  combo.show(names[tint.kind]);
  const layerBox = $("#tint-layer");
  layerBox.hidden = tint.kind !== "vector";
  if (tint.kind === "vector") {
    const options = layersOfTint(tint).map((layer) =>
      h("option", { value: layer, selected: layer === tint.layer }, `${layer}`),
    );
    fill($("select", layerBox), options);
  }
  fill($("#legend"), legend(tint));
}

function legend(tint) {
  if (tint.kind === "none") return [];
  if (tint.kind === "lead") return leaders();
  if (tint.kind === "concept") return [h("span", "0"), h("i.one"), h("span", "1")];
  const { middle, reach, n } = range();
  if (!n) return [h("span", "measured when an answer ends")];
  const scale = h("i.two", { title: `median ${short(middle)}` });
  return [h("span", signed(middle - reach)), scale, h("span", signed(middle + reach))];
}

/** The hues that occur most often in the last turn with readings. */
function leaders() {
  const counts = new Map();
  const turn = state.turns.findLast((one) => one.runs.some((run) => run.top.length));
  for (const run of turn?.runs ?? [])
    for (const top of run.top) if (top?.length) counts.set(top[0], (counts.get(top[0]) ?? 0) + 1);
  const most = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, LEADERS);
  if (!most.length) return [h("span", "a hue for each concept"), h("i.many")];
  return most.map((index) => {
    const one = state.concepts[index];
    const act = { title: "Tint by this concept", onclick: () => tintByConcept(one.id) };
    return h("button.key", act, h("i", { "--tone": tone(index) }), one.name);
  });
}

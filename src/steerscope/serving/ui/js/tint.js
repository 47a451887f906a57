// The colour of each token, and the legend that explains it.
import { $, clamp, fill, h, set, short, signed, soon } from "./dom.js";
import {
  allTexts,
  change,
  conceptById,
  conceptIndex,
  conceptItems,
  emit,
  on,
  score,
  settings,
  state,
} from "./state.js";
import { combo } from "./controls.js";
import { layersOf } from "./vectors.js";

const LEADERS = 4;
const NOTHING = { v: 0, tone: "var(--heat)" };
const NAMES = { none: "No tint", lead: "Leading concept" };
let showName;
let cached = null;

export function setUpTint() {
  showName = combo($("#tint"), { label: "Tint tokens by", items, pick: setTint });
  const onchange = ({ target }) => setTint({ ...settings.tint, layer: Number(target.value) });
  set($("#tint-layer select"), { onchange });
  on("vectors lenses turns", () => soon(show));
  on("run-end", () => {
    cached = null;
    if (settings.tint.kind === "vector") emit("tint");
    soon(show);
  });
  show();
}

/** {v: 0…1, tone: a CSS colour} of a token. */
export function paint(run, i) {
  const tint = settings.tint;
  if (tint.kind === "lead") return run.top[i]?.length ? { v: run.top[i][1], tone: tone(run.top[i][0]) } : NOTHING;
  if (tint.kind === "concept") return { ...NOTHING, v: score(run, i, conceptIndex(tint.id)) ?? 0 };
  const value = run.projections[tint.name]?.[tint.layer]?.[i] ?? null; // of no tint, null
  if (value === null) return NOTHING;
  const { middle, reach } = range();
  const away = clamp((value - middle) / reach, -1, 1);
  return { v: Math.abs(away), tone: away < 0 ? "var(--cool)" : "var(--heat)" };
}

/** The hue of a concept: neighbours in the tree get neighbouring hues. */
function tone(index) {
  const n = Math.max(state.concepts.length, 6);
  const hue = (20 + (360 * (state.concepts[index].order % n)) / n) % 360;
  return `oklch(0.72 0.13 ${hue.toFixed(0)})`;
}

/** The projections' median and spread. One layer's often share a large offset, so colours start from the median. */
function range() {
  if (cached) return cached;
  const { name, layer } = settings.tint;
  const values = allTexts()
    .flatMap((run) => run.projections[name]?.[layer] ?? [])
    .filter(Number.isFinite);
  values.sort((a, b) => a - b);
  const middle = values[values.length >> 1] ?? 0;
  const far = values.map((value) => Math.abs(value - middle)).sort((a, b) => a - b);
  cached = { middle, reach: far[Math.floor(far.length * 0.97)] || 1, n: values.length };
  return cached;
}

/** The layers of the tint's vector. */
function layersOfTint(tint) {
  const vector = state.vectors.find((one) => one.name === tint.name);
  return vector ? layersOf(vector) : [tint.layer ?? 0];
}

function setTint(tint) {
  cached = null;
  if (tint.kind === "vector") tint = { layer: layersOfTint(tint).at(-1), ...tint };
  change({ tint }, "tint");
  soon(show);
}

export const tintByConcept = (id) => setTint({ kind: "concept", id });

function items() {
  const group = (name, list) => (list.length ? [{ group: name }, ...list] : []);
  const vectors = state.vectors.map(({ name }) => ({ value: { kind: "vector", name }, label: name, hint: "vector" }));
  const concepts = conceptItems().map((one) => ({ ...one, value: { kind: "concept", id: one.value } }));
  return [
    { value: { kind: "lead" }, label: NAMES.lead, hint: "a hue each" },
    { value: { kind: "none" }, label: NAMES.none },
    ...group("Projection on a vector", vectors),
    ...group("One concept", concepts),
  ];
}

function show() {
  const tint = settings.tint;
  const concept = conceptById(tint.id)?.name ?? tint.id;
  showName({ ...NAMES, concept, vector: `Projection on ${tint.name}` }[tint.kind]);
  const layers = tint.kind === "vector" ? layersOfTint(tint) : [];
  $("#tint-layer").hidden = !layers.length;
  const option = (layer) => h("option", { value: layer, selected: layer === tint.layer }, `${layer}`);
  fill($("#tint-layer select"), layers.map(option));
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
  for (const top of turn?.runs.flatMap((run) => run.top) ?? [])
    if (top?.length) counts.set(top[0], (counts.get(top[0]) ?? 0) + 1);
  const most = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, LEADERS);
  if (!most.length) return [h("span", "a hue for each concept"), h("i.many")];
  return most.map((index) => {
    const { id, name } = state.concepts[index];
    const act = { title: "Tint by this concept", onclick: () => tintByConcept(id) };
    return h("button.key", act, h("i", { "--tone": tone(index) }), name);
  });
}

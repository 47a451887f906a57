// From the sliders to the ops of a request.
import { settings, state } from "./state.js";
import { short, signed, spans } from "./dom.js";

/** The layers a vector can act on. */
export function layersOf(vector) {
  if (vector.layers?.length) return vector.layers;
  return Array.from({ length: state.facts?.layers ?? 1 }, (_, i) => i);
}

/** The settings of a vector's card. */
export function knobs(vector) {
  const layers = layersOf(vector);
  const [first, last] = [layers[0], layers.at(-1)];
  const bounds = { scale: 0.5, keep: 0, min: -10, max: 10 };
  const measure = state.vectors.indexOf(vector) < 6;
  const start = { on: false, op: "add", ...bounds, tokens: "all", from: first, to: last, measure };
  const one = { ...start, ...settings.steer[vector.name] };
  const misfits = one.from < first || one.to > last || one.from > one.to;
  return misfits ? { ...one, from: first, to: last } : one;
}

/** The ops of all vectors that are switched on. */
export function steering() {
  return state.vectors
    .map((vector) => [vector, knobs(vector)])
    .filter(([, one]) => one.on)
    .map(([vector, one]) => op(vector, one));
}

function op(vector, one) {
  const layers = layersOf(vector).filter((layer) => layer >= one.from && layer <= one.to);
  const found = { op: one.op, vector: vector.name, layers };
  if (vector.site && vector.site !== "resid_post") found.site = vector.site;
  if (one.tokens !== "all") found.tokens = one.tokens;
  if (one.op === "add") found.scale = one.scale;
  if (one.op === "cap") Object.assign(found, { min: one.min, max: one.max });
  if (one.op === "ablate") found.scale = one.keep;
  return found;
}

/** Names of the vectors on which tokens are projected. */
export const measured = () => state.vectors.filter((vector) => knobs(vector).measure).map((vector) => vector.name);

/** "happy +0.50" */
export function opText(op) {
  const name = typeof op.vector === "string" ? op.vector : "vector";
  if (op.op === "cap") return `${name} ${short(op.min ?? -Infinity)}…${short(op.max ?? Infinity)}`;
  if (op.op === "ablate") return op.scale ? `${name} ×${short(op.scale)}` : `without ${name}`;
  return `${name} ${signed(op.scale)}`;
}
export const opTextLong = (op) =>
  `${op.op} ${opText(op)}, layers ${spans(op.layers)}${op.tokens ? `, ${op.tokens} tokens` : ""}`;

// From the sliders to the ops of a request.
import { settings, state } from "./state.js";
import { short, signed, spans } from "./dom.js";

/** The layers a vector can act on. */
export function layersOf(vector) {
  const has = vector.layers;
  if (Array.isArray(has) && has.length) return has;
  return Array.from({ length: state.facts?.layers ?? 1 }, (_, i) => i);
}

export function knobs(vector) {
  const has = layersOf(vector);
  const start = {
    on: false,
    op: "add",
    scale: 0.5,
    keep: 0,
    min: -10,
    max: 10,
    tokens: "all",
    from: has[0],
    to: has.at(-1),
    measure: state.vectors.indexOf(vector) < 6,
  };
  const one = { ...start, ...settings.steer[vector.name] };
  if (one.from < has[0] || one.to > has.at(-1) || one.from > one.to)
    Object.assign(one, { from: has[0], to: has.at(-1) });
  return one;
}

export function steering() {
  return state.vectors
    .map((vector) => [vector, knobs(vector)])
    .filter(([, one]) => one.on)
    .map(([vector, one]) => op(vector, one));
}

function op(vector, one) {
  const layers = layersOf(vector).filter((layer) => layer >= one.from && layer <= one.to);
  const shape = { op: one.op, vector: vector.name, layers };
  if (vector.site && vector.site !== "resid_post") shape.site = vector.site;
  if (one.tokens !== "all") shape.tokens = one.tokens;
  if (one.op === "add") shape.scale = one.scale;
  if (one.op === "cap") Object.assign(shape, { min: one.min, max: one.max });
  if (one.op === "ablate") shape.scale = one.keep;
  return shape;
}

/** Vectors whose projections are asked for. */
export const measured = () => state.vectors.filter((vector) => knobs(vector).measure).map((vector) => vector.name);

/** "happy +0.50" */
export function told(op) {
  const where = typeof op.vector === "string" ? op.vector : "vector";
  if (op.op === "cap") return `${where} ${short(op.min ?? -Infinity)}…${short(op.max ?? Infinity)}`;
  if (op.op === "ablate") return op.scale ? `${where} ×${short(op.scale)}` : `without ${where}`;
  return `${where} ${signed(op.scale)}`;
}
export const toldLong = (op) =>
  `${op.op} ${told(op)}, layers ${spans(op.layers)}${op.tokens ? `, ${op.tokens} tokens` : ""}`;

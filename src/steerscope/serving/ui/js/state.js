// The page's state: plain data. A change is announced with emit(topic), and views listen with on(topic).
import { later } from "./dom.js";

const listeners = new Map();
export function on(topics, react) {
  for (const topic of topics.split(" ")) listeners.set(topic, [...(listeners.get(topic) ?? []), react]);
}
export function emit(topic, detail) {
  for (const react of listeners.get(topic) ?? []) react(detail);
}

export const state = {
  connection: "starting", // starting, ready, offline, locked, failed
  facts: null, // of /v1/capabilities
  vectors: [], // of /v1/vectors: {name, layers | null, …}
  lenses: [], // of /v1/lenses
  serverSteering: null,
  concepts: [], // {id, name, path, depth, order}, in the order they became known
  turns: [],
  shownTurn: null, // the turn of the heat map; null: the last
  pinned: null, // {run, i}
  running: 0,
};

export const settings = {
  tint: { kind: "lead" }, // none, lead, concept {id}, vector {name, layer}
  compare: false,
  pack: null,
  topK: 12,
  order: "strength",
  column: 13,
  rules: [],
  steer: {}, // vector name → see knobs in steering.js
  temperature: 0,
  topP: 1,
  maxTokens: 120,
  seed: 0,
  penalty: 1.1,
  system: "",
  capture: false,
  captureLayers: "",
  tab: "steer",
  dock: null,
};

// --- concepts

const known = new Map(); // id → index

export function concept(id, name, path) {
  let index = known.get(id);
  if (index === undefined) {
    index = state.concepts.length;
    known.set(id, index);
    const steps = Array.isArray(path) ? path : path ? [path] : [name];
    state.concepts.push({ id, name: name ?? id, path: steps, depth: Math.max(0, steps.length - 1), order: index });
  }
  return index;
}
export const conceptIndex = (id) => known.get(id) ?? -1;

export const conceptById = (id) => state.concepts[conceptIndex(id)];

/** All concepts as items of a list, children after their parents. */
export const conceptItems = () =>
  [...state.concepts]
    .sort((a, b) => a.order - b.order)
    .map((one) => ({ value: one.id, label: one.name, depth: one.depth, find: one.path.join(" ") }));

/** Neighbours in the tree get neighbouring hues. */
export function hue(index) {
  const n = Math.max(state.concepts.length, 6);
  return (20 + (360 * (state.concepts[index].order % n)) / n) % 360;
}

// --- kept over a reload: settings in localStorage, the conversation in IndexedDB (it can be megabytes)

try {
  Object.assign(settings, JSON.parse(localStorage.getItem("steerscope.settings") ?? "{}"));
} catch {
  // Storage is off, or what lies there is not ours: defaults.
}

function keepSettings() {
  try {
    localStorage.setItem("steerscope.settings", JSON.stringify(settings));
  } catch {
    // Without storage the page works until it is closed.
  }
}
const write = later(keepSettings, 150);
addEventListener("pagehide", keepSettings); // a change may still wait
export function change(changes, topic) {
  Object.assign(settings, changes);
  write();
  if (topic) emit(topic);
}

function database() {
  return new Promise((resolve, reject) => {
    const open = indexedDB.open("steerscope", 1);
    open.onupgradeneeded = () => open.result.createObjectStore("kept");
    open.onsuccess = () => resolve(open.result);
    open.onerror = () => reject(open.error);
  });
}

async function kept(mode, act) {
  const db = await database();
  try {
    return await new Promise((resolve, reject) => {
      const asked = act(db.transaction("kept", mode).objectStore("kept"));
      asked.onsuccess = () => resolve(asked.result);
      asked.onerror = () => reject(asked.error);
    });
  } finally {
    db.close();
  }
}

export async function keepConversation() {
  const turns = state.turns.map((turn) => ({ ...turn, runs: turn.runs.map(({ abort: _, ...run }) => run) }));
  const concepts = state.concepts.map(({ id, name, path }) => ({ id, name, path }));
  await kept("readwrite", (store) => store.put({ turns, concepts }, "conversation")).catch(() => {});
}
export async function restoreConversation() {
  const found = await kept("readonly", (store) => store.get("conversation")).catch(() => null);
  if (!found?.turns) return;
  // Numbers of concepts are those of the session that wrote them.
  const place = found.concepts.map((one) => concept(one.id, one.name, one.path));
  for (const turn of found.turns) {
    for (const run of turn.runs) {
      for (const one of run.said ? [run, run.said] : [run])
        one.top = one.top.map((top) => top && top.map((value, i) => (i % 2 ? value : place[value])));
      if (run.status === "waiting" || run.status === "writing") run.status = "stopped";
    }
  }
  state.turns = found.turns;
}

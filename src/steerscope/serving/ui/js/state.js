// The page's state: plain data. A change is announced with emit(topic), and views listen with on(topic).

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
  steer: {}, // vector name → see knobs in vectors.js
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
  theme: "auto",
};

/** All answers. */
export const allRuns = () => state.turns.flatMap((turn) => turn.runs);

/** All texts with tokens: the answers, and their messages once the server has sent them. */
export const allTexts = () => allRuns().flatMap((run) => (run.said ? [run, run.said] : [run]));

export const chosenPack = () => state.lenses.find((one) => one.name === settings.pack);

// --- concepts

const known = new Map(); // id → index

export function concept(id, name, path) {
  let index = known.get(id);
  if (index === undefined) {
    index = state.concepts.length;
    known.set(id, index);
    const steps = Array.isArray(path) ? path : [path || name];
    state.concepts.push({ id, name: name ?? id, path: steps, depth: Math.max(0, steps.length - 1), order: index });
  }
  return index;
}
export const conceptIndex = (id) => known.get(id) ?? -1;

export const conceptById = (id) => state.concepts[conceptIndex(id)];

/** All concepts as items of a list, children after their parents. */
export const conceptItems = () =>
  state.concepts
    .toSorted((a, b) => a.order - b.order)
    .map((one) => ({ value: one.id, label: one.name, depth: one.depth, find: one.path.join(" ") }));

/** The readings of a token as [concept, score] pairs, best first; kept as [concept, score, concept, score, …]. */
export function readings(run, i) {
  const top = run.top[i] ?? [];
  return Array.from({ length: top.length / 2 }, (_, j) => [top[2 * j], top[2 * j + 1]]);
}

/** The score of a concept at a token: 0 below the top ones, null without a reading. */
export function score(run, i, index) {
  const found = readings(run, i).find(([one]) => one === index);
  return found ? found[1] : run.top[i] ? 0 : null;
}

// --- kept over a reload: settings in localStorage, the conversation in IndexedDB (it can be megabytes)

/** Do something with a storage of the browser. Where that is off, the page works until it is closed. */
export function stored(act) {
  try {
    return act();
  } catch {
    return null;
  }
}

stored(() => Object.assign(settings, JSON.parse(localStorage.getItem("steerscope.settings"))));
const keepSettings = () => stored(() => localStorage.setItem("steerscope.settings", JSON.stringify(settings)));
addEventListener("pagehide", keepSettings); // a change may still wait
let timer = 0;

export function change(changes, topic) {
  Object.assign(settings, changes);
  clearTimeout(timer);
  timer = setTimeout(keepSettings, 150);
  if (topic) emit(topic);
}

const answered = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = reject;
  });

/** Do something with the store of the conversation; null where there is no storage. */
async function conversationStore(mode, act) {
  try {
    const open = indexedDB.open("steerscope", 1);
    open.onupgradeneeded = () => open.result.createObjectStore("kept");
    const database = await answered(open);
    const request = act(database.transaction("kept", mode).objectStore("kept"));
    database.close(); // once the transaction is over
    return await answered(request);
  } catch {
    return null;
  }
}

export async function keepConversation() {
  const turns = state.turns.map((turn) => ({ ...turn, runs: turn.runs.map(({ abort: _, ...run }) => run) }));
  const concepts = state.concepts.map(({ id, name, path }) => ({ id, name, path }));
  await conversationStore("readwrite", (store) => store.put({ turns, concepts }, "conversation"));
}

export async function restoreConversation() {
  const found = await conversationStore("readonly", (store) => store.get("conversation"));
  if (!found?.turns) return;
  state.turns = found.turns;
  // Numbers of concepts are those of the session that wrote them.
  const place = found.concepts.map((one) => concept(one.id, one.name, one.path));
  for (const text of allTexts()) {
    text.top = text.top.map((top) => top && top.map((value, i) => (i % 2 ? value : place[value])));
    if (text.status !== "failed" && text.status !== "done") text.status = "stopped";
  }
}
